"""Finds the layouts of a run that the trainer accepts and that fit the devices, and orders them by predicted time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from ..models.auto import build_on_meta
from ..models.common.config import ModelConfig
from ..models.common.pipeline import equal_counts
from ..models.registry import family
from ..models.sizes import largest_size, parameter_sizes
from ..trainer.estimate import Job, estimate
from .cost import FITTED, Constants, Network, Recompute, Run, StepTime, network_of, step_time
from .hardware import Cluster

SPARE = 0.05
"""Share of the device's memory that is left to NCCL's buffers and the allocator's fragments (docs/estimate.md)."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Request:
    """What is asked for: devices, the global batch in sequences, their lengths in tokens, precision and optimizer."""

    gpus: int
    global_batch: int
    length: int
    target_length: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    optimizer: Literal["adamw", "adafactor", "lion", "lamb"] = "adamw"
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        for name in ("gpus", "global_batch", "length", "target_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted step and the bytes in use at its peak, which are those of `shardzoo estimate`."""

    run: Run
    time: StepTime
    memory: int

    def mfu(self, cluster: Cluster) -> float:
        """Returns the share of the devices' peak that the model's FLOPs reach, without those of recomputation."""
        return self.time.flops / (self.time.total * self.run.gpus * cluster.device.peak)


def network_of_config(config: ModelConfig) -> Network:
    """Returns the network of a model of the zoo."""
    sizes = parameter_sizes(config)
    activations = family(config.model_type).activations(config)
    owned = (stack for stack in activations.stacks if any(size.name.startswith(stack.path) for size in sizes))
    parameters = sum(size.full for size in sizes)
    return network_of(replace(activations, stacks=tuple(owned)), config.vocab_size, parameters)


def job_of(run: Run, request: Request) -> Job:
    """Returns the memory estimate's job of a layout. ValueError if the trainer would refuse it."""
    return Job(
        micro_batch_size=run.micro_batch,
        length=run.length,
        target_length=request.target_length,
        accumulation_steps=run.micro_batches,
        tensor_parallel_size=run.tensor,
        data_parallel_size=run.data,
        pipeline_parallel_size=run.pipeline,
        zero_stage=run.zero_stage,  # pyright: ignore[reportArgumentType]
        sequence_parallel=run.sequence_parallel,
        recompute=run.recompute,
        precision=request.precision,
        optimizer=request.optimizer,
        device=request.device,
    )


def layouts(config: ModelConfig, request: Request, node_size: int) -> Iterator[Run]:
    """Yields every layout that the trainer accepts, with tensor parallelism inside nodes and equal pipeline stages."""
    model = build_on_meta(config, None)
    widest = min(largest_size(model), node_size)
    itemsize = 4 if request.precision == "fp32" else 2
    for tensor, pipeline in product(divisors(request.gpus), divisors(request.gpus)):
        data = request.gpus // (tensor * pipeline)
        if tensor > widest or not data or request.gpus % (tensor * pipeline) or request.global_batch % data:
            continue
        if not _divides(model, pipeline) or (pipeline > 1 and request.precision == "fp16"):
            continue
        batches = [size for size in divisors(request.global_batch // data) if size & (size - 1) == 0]
        parallel = (False, True) if tensor > 1 and request.length % tensor == 0 else (False,)
        for stage, recompute, split, batch in product(_stages(tensor, pipeline, data), RECOMPUTE, parallel, batches):
            run = Run(
                request.gpus, request.global_batch, batch, request.length, request.target_length or 0, tensor, pipeline,
                recompute=recompute, sequence_parallel=split, zero_stage=stage, itemsize=itemsize,
                gradient_itemsize=itemsize,
            )  # fmt: skip
            if _accepts(run, request):
                yield run


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _divides(model: Any, stages: int) -> bool:
    try:
        return bool(equal_counts(model, stages))
    except ValueError:
        return False


def _stages(tensor: int, pipeline: int, data: int) -> tuple[int, ...]:
    """Returns ZeRO stages: more than 1 saves nothing without data parallelism; 3 is for data parallelism alone."""
    if pipeline > 1 or data == 1:
        return (1,)
    return (1, 2) if tensor > 1 else (1, 2, 3)


def _accepts(run: Run, request: Request) -> bool:
    try:
        job_of(run, request)
    except ValueError:
        return False
    return True


def plans(
    config: ModelConfig, request: Request, cluster: Cluster, constants: Constants = FITTED, best: int = 10
) -> list[Plan]:
    """Returns the `best` layouts that fit, the fastest first. ValueError if the model does not allow the lengths.

    Layouts are examined in the order of their predicted times. One that does not fit rules out larger micro-batches.
    """
    network, room = network_of_config(config), cluster.device.memory * (1 - SPARE)
    timed = [(step_time(network, run, cluster, constants), run) for run in layouts(config, request, cluster.node_size)]
    found: list[Plan] = []
    too_large: dict[Run, int] = {}
    for time, run in sorted(timed, key=lambda pair: pair[0].total):
        kind = replace(run, micro_batch=1)
        if len(found) == best or run.micro_batch >= too_large.get(kind, run.micro_batch + 1):
            continue
        memory = estimate(config, job_of(run, request)).peak.total
        if memory <= room:
            found.append(Plan(run, time, memory))
        else:
            too_large[kind] = run.micro_batch
    return found
