"""Finds the layouts of a run that the trainer accepts and that fit the devices, and orders them by predicted time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Literal

from ..models.auto import unsplit_on_meta
from ..models.config import ModelConfig
from ..models.pipeline import equal_counts
from ..models.registry import family
from ..models.sizes import largest_size, parameter_sizes
from ..trainer.estimate import Job, estimate
from .cost import Network, Recompute, Run, StepTime, network_of, step_time
from .hardware import Cluster, cluster_of

SPARE = 0.05
"""Share of the device's memory that is left to NCCL's buffers and the allocator's fragments (docs/estimate.md)."""
HOST_BANDWIDTH = 10e9
"""Bytes per second from a device to pageable memory of the host, over PCIe 4 or 5."""
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
        return self.time.flops / (
            self.time.total * self.run.gpus * cluster.device.peak_of(self.run.itemsize)
        )


def network_of_config(config: ModelConfig) -> Network:
    """Returns the network of a model of the zoo."""
    sizes = parameter_sizes(config)
    activations = family(config.model_type).activations(config)
    owned = (
        stack
        for stack in activations.stacks
        if any(size.name.startswith(stack.path) for size in sizes)
    )
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


def save_seconds(config: ModelConfig, run: Run, request: Request) -> float:
    """Returns how long a save stops training at most: a rank copies its weights and optimizer state to the host."""
    lines = estimate(config, job_of(run, request)).moments[-1].lines
    return (
        sum(lines[name] for name in ("parameters", "fp32 master weights", "optimizer state"))
        / HOST_BANDWIDTH
    )


def layouts(config: ModelConfig, request: Request, node_size: int) -> Iterator[Run]:
    """Yields every layout that the trainer accepts, with tensor parallelism inside nodes and equal pipeline stages."""
    model = unsplit_on_meta(config)
    widest = min(largest_size(model), node_size)
    itemsize = 4 if request.precision == "fp32" else 2
    for tensor, pipeline in product(divisors(request.gpus), divisors(request.gpus)):
        data = request.gpus // (tensor * pipeline)
        if (
            tensor > widest
            or not data
            or request.gpus % (tensor * pipeline)
            or request.global_batch % data
        ):
            continue
        if not _divides(model, pipeline) or (pipeline > 1 and request.precision == "fp16"):
            continue
        batches = [
            size for size in divisors(request.global_batch // data) if size & (size - 1) == 0
        ]
        parallel = (False, True) if tensor > 1 and request.length % tensor == 0 else (False,)
        for stage, recompute, split, batch in product(
            _stages(tensor, pipeline, data), RECOMPUTE, parallel, batches
        ):
            run = Run(
                request.gpus, request.global_batch, batch, request.length, request.target_length or 0, tensor, pipeline,
                recompute=recompute, sequence_parallel=split, zero_stage=stage, itemsize=itemsize,
                gradient_itemsize=itemsize,
            )  # fmt: skip
            if _accepts(run, request):
                yield run


def _split(run: Run) -> tuple[int, int, int, bool]:
    """Returns all that decides the memory in the optimizer's step: it holds no activations."""
    return run.tensor, run.pipeline, run.zero_stage, run.micro_batches > 1


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


def plans(config: ModelConfig, request: Request, cluster: Cluster, best: int = 10) -> list[Plan]:
    """Returns the `best` layouts that fit, the fastest first. ValueError if the model does not allow the lengths.

    Layouts are examined in the order of their predicted times. One that does not fit rules out larger micro-batches.
    """
    network, room = network_of_config(config), cluster.device.memory * (1 - SPARE)
    timed = [
        (step_time(network, run, cluster), run)
        for run in layouts(config, request, cluster.node_size)
    ]
    found: list[Plan] = []
    too_large: dict[Run, int] = {}
    hopeless = set[tuple[int, int, int, bool]]()
    for time, run in sorted(timed, key=lambda pair: pair[0].total):
        kind, split = replace(run, micro_batch=1), _split(run)
        if (
            len(found) == best
            or split in hopeless
            or run.micro_batch >= too_large.get(kind, run.micro_batch + 1)
        ):
            continue
        needed = estimate(config, job_of(run, request))
        if needed.peak.total <= room:
            found.append(Plan(run, time, needed.peak.total))
            continue
        too_large[kind] = run.micro_batch
        if needed.moments[-1].total > room:
            hopeless.add(split)
    return found


@dataclass(frozen=True)
class Remedy:
    """Changes that make a job fit.

    Attributes:
        changes: The changed fields of the job.
        memory: Bytes at the peak.
        cost: Predicted device time for a sequence, relative to that of the job as it is.
    """

    changes: dict[str, Any]
    memory: int
    cost: float


Ladder = Sequence[dict[str, Any]]
"""Ways to save memory by one means, from the mildest to the strongest."""


def remedies(config: ModelConfig, job: Job, memory: float) -> list[Remedy]:
    """Returns what makes a job need at most `memory` bytes, the cheapest first; another optimizer always comes last.

    Recomputation, ZeRO, smaller micro-batches with as many more of them, tensor parallelism over further devices, with
    sequence parallelism, and Adafactor are tried alone and together. What does more than another remedy is left out.
    """
    network, ladders, found = (
        network_of_config(config),
        _ladders(config, job),
        dict[tuple[int, ...], Remedy](),
    )
    before = _device_time(network, job)
    for count in range(1, len(ladders) + 1):
        for chosen in combinations(range(len(ladders)), count):
            for rungs in product(*(range(1, len(ladders[number]) + 1) for number in chosen)):
                steps = dict(zip(chosen, rungs, strict=True))
                place = tuple(steps.get(number, 0) for number in range(len(ladders)))
                if any(all(a <= b for a, b in zip(other, place, strict=True)) for other in found):
                    continue
                changes = {
                    k: v
                    for number, rung in steps.items()
                    for k, v in ladders[number][rung - 1].items()
                }
                if fitting := _fitting(config, job, changes, memory):
                    changed, needed = fitting
                    found[place] = Remedy(changes, needed, _device_time(network, changed) / before)
    return sorted(
        found.values(),
        key=lambda remedy: ("optimizer" in remedy.changes, remedy.cost, remedy.memory),
    )


def _ladders(config: ModelConfig, job: Job) -> list[Ladder]:
    batch, tensor, order = job.micro_batch_size, job.tensor_parallel_size, [*RECOMPUTE]
    smaller = [size for size in reversed(divisors(batch)) if size < batch]
    widest = min(largest_size(unsplit_on_meta(config)), cluster_of("a100").node_size)
    wider = [
        {"tensor_parallel_size": factor * tensor}
        for factor in (2, 4, 8)
        if factor * tensor <= widest
    ]
    stages = range((job.stage or 0) + 1, 4) if job.data_parallel_size > 1 else ()
    ladders: list[Ladder] = [
        [{"recompute": value} for value in order[order.index(job.recompute) + 1 :]],
        [{"zero_stage": stage} for stage in stages],
        [
            {"micro_batch_size": s, "accumulation_steps": job.accumulation_steps * batch // s}
            for s in smaller
        ],
        wider,
        [{"sequence_parallel": True}] if not job.sequence_parallel else [],
        [{"optimizer": "adafactor"}] if job.optimizer != "adafactor" else [],
    ]
    return [ladder for ladder in ladders if ladder]


def _fitting(
    config: ModelConfig, job: Job, changes: dict[str, Any], memory: float
) -> tuple[Job, int] | None:
    """Returns the changed job and its bytes, or None if the trainer refuses it or it needs more than `memory`."""
    try:
        changed = replace(job, **changes)
        if changed.sequence_parallel and (changed.tensor_parallel_size == 1 or _odd(changed)):
            return None
        needed = estimate(config, changed).peak.total
    except ValueError:
        return None
    return (changed, needed) if needed <= memory else None


def _odd(job: Job) -> bool:
    """Returns whether a sequence does not divide among the tensor-parallel ranks."""
    return any(length % job.tensor_parallel_size for length in (job.length, job.target_length or 0))


def _device_time(network: Network, job: Job) -> float:
    """Returns the predicted seconds of all devices for one sequence of a job, on A100 or on CPUs."""
    gpus = job.tensor_parallel_size * job.pipeline_parallel_size * job.data_parallel_size
    batch = job.micro_batch_size * job.accumulation_steps * job.data_parallel_size
    run = Run(
        gpus, batch, job.micro_batch_size, job.length, job.target_length or 0, job.tensor_parallel_size,
        job.pipeline_parallel_size, recompute=job.recompute, sequence_parallel=job.sequence_parallel,
        zero_stage=job.stage or 0, itemsize=job.itemsize, gradient_itemsize=job.itemsize,
    )  # fmt: skip
    cluster = cluster_of("a100" if job.device == "cuda" else "cpu")
    return step_time(network, run, cluster).total * gpus / batch
