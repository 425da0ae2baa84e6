"""Finds the layouts of a run that the trainer accepts and that fit, ordered by predicted time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from ..files.printable import describe
from ..models.auto import unsplit_on_meta
from ..models.config import ModelConfig
from ..models.parallel_config import Recompute
from ..models.pipeline import split_blocks_evenly
from ..models.registry import family
from ..models.sizes import largest_size, parameter_sizes
from ..mpu.division import divisors
from ..trainer.estimate import Job, estimate
from ..trainer.optimizers.registry import OptimizerName
from ..trainer.precisions import PRECISIONS, PrecisionName
from .cost import Network, PlannedRun, StepTime, step_time
from .hardware import Cluster

SPARE = 0.05
"""Share of the device's memory left to NCCL's buffers and the allocator's fragments
(docs/estimate.md).
"""
HOST_BANDWIDTH = 10e9
"""Bytes per second from a device to pageable memory of the host, over PCIe 4 or 5."""
# Limits of what is asked for, so that listing the layouts, or simulating one, ends soon.
# Shorter parts of sequences do not fill a device, and tensor parallelism splits them more cheaply.
FEWEST_POSITIONS = 2048
MOST = {"gpus": 1_000_000, "global_batch": 10_000_000, "length": 1 << 30, "target_length": 1 << 30}
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""Those that are tried: what else there is takes as long as the last one."""


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for.

    Attributes:
        gpus: Devices.
        global_batch: Sequences.
        length, target_length: Tokens of a sequence.
    """

    gpus: int
    global_batch: int
    length: int
    target_length: int | None = None
    precision: PrecisionName = "bf16"
    optimizer: OptimizerName = "adamw"
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
            if value > most:
                raise ValueError(f"{name} must be at most {most:,}, not {describe(value)}")


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted step, and the bytes at its peak that `shardzoo estimate` gives."""

    run: PlannedRun
    time: StepTime
    memory: int

    def mfu(self, cluster: Cluster) -> float:
        """Returns the share of the devices' peak that the model's FLOPs reach.

        Those of recomputation do not count.
        """
        peak = self.run.gpus * cluster.device.peak_flops(self.run.itemsize)
        return self.time.flops / (self.time.total * peak)


def build_network(config: ModelConfig) -> Network:
    """Returns the network of a model of the zoo."""
    sizes = parameter_sizes(config)
    activations = family(config.model_type).activations(config)
    # An architecture may lack a stack of its family, as an encoder alone does.
    stacks = tuple(
        stack
        for stack in activations.stacks
        if any(size.name.startswith(stack.path) for size in sizes)
    )
    parameters = sum(size.full for size in sizes)
    in_experts = sum(size.full for size in sizes if size.is_expert)
    return Network.from_activations(
        replace(activations, stacks=stacks), config.vocab_size, parameters, in_experts
    )


def build_estimate_job(run: PlannedRun, request: PlanRequest) -> Job:
    """Returns a layout as the memory estimate takes it.

    Raises:
        ValueError: The trainer would refuse the layout.
    """
    return Job(
        micro_batch_size=run.micro_batch,
        length=run.length,
        target_length=request.target_length,
        accumulation_steps=run.micro_batches,
        tensor_parallel_size=run.tensor,
        data_parallel_size=run.data // run.expert,
        pipeline_parallel_size=run.pipeline,
        context_parallel_size=run.context,
        expert_parallel_size=run.expert,
        zero_stage=None if run.fsdp else run.zero_stage,  # pyright: ignore[reportArgumentType]
        fsdp=run.fsdp,
        sequence_parallel=run.sequence_parallel,
        recompute=run.recompute,
        precision=request.precision,
        optimizer=request.optimizer,  # pyright: ignore[reportArgumentType]
        device=request.device,
    )


def save_seconds(config: ModelConfig, run: PlannedRun, request: PlanRequest) -> float:
    """Returns how long a save stops training at most.

    A rank then copies its weights and optimizer state to the host.
    """
    in_update = estimate(config, build_estimate_job(run, request)).moments[-1].lines
    copied = ("parameters", "fp32 master weights", "optimizer state")
    return sum(in_update[name] for name in copied) / HOST_BANDWIDTH


def find_plans(
    config: ModelConfig, request: PlanRequest, cluster: Cluster, best: int = 10
) -> list[Plan]:
    """Returns the `best` layouts that fit, the fastest first.

    Layouts are examined in the order of their predicted times. One that does not fit rules out the
    same layout with larger micro-batches.

    Raises:
        ValueError: The model does not allow the lengths.
    """
    network = build_network(config)
    room = cluster.device.memory * (1 - SPARE)
    timed = [
        (step_time(network, run, cluster), run)
        for run in list_layouts(config, request, cluster.node_size)
    ]
    timed.sort(key=lambda pair: pair[0].total)
    plans: list[Plan] = []
    smallest_too_large: dict[PlannedRun, int] = {}
    update_too_large: set[tuple[Any, ...]] = set()
    for time, run in timed:
        if len(plans) == best:
            break
        # The optimizer's step holds no activations, so these alone decide what it needs.
        accumulates = run.micro_batches > 1
        engine = (run.zero_stage, run.fsdp, accumulates)
        decides_update = (run.tensor, run.pipeline, run.context, run.expert, *engine)
        if decides_update in update_too_large:
            continue
        any_micro_batch = replace(run, micro_batch=1)
        if run.micro_batch >= smallest_too_large.get(any_micro_batch, run.micro_batch + 1):
            continue
        needed = estimate(config, build_estimate_job(run, request))
        if needed.peak.total <= room:
            plans.append(Plan(run, time, needed.peak.total))
            continue
        smallest_too_large[any_micro_batch] = run.micro_batch
        if needed.moments[-1].total > room:
            update_too_large.add(decides_update)
    return plans


def list_layouts(config: ModelConfig, request: PlanRequest, node_size: int) -> Iterator[PlannedRun]:
    """Yields every layout that the trainer accepts.

    Tensor parallelism stays inside a node, and pipeline stages are equal. Context-parallel ranks have
    `FEWEST_POSITIONS` or more each. Experts of mixtures are dealt over equal parts of the ranks.
    """
    model = unsplit_on_meta(config)
    widest = min(largest_size(model), node_size)
    itemsize = 4 if request.precision == "fp32" else 2
    sizes = divisors(request.gpus)
    parts = [size for size in sizes if _splits_lengths(request, size)]
    for tensor, pipeline, context in product(sizes, sizes, parts):
        of_a_replica = tensor * pipeline * context
        data = request.gpus // of_a_replica
        if tensor > widest or not data or request.gpus % of_a_replica:
            continue
        if request.global_batch % data:
            continue
        if not _has_equal_stages(model, pipeline):
            continue
        if pipeline > 1 and request.precision == "fp16":
            continue
        per_replica = divisors(request.global_batch // data)
        powers_of_two = [size for size in per_replica if size & (size - 1) == 0]
        divides = request.length % (tensor * context) == 0
        splits = (False, True) if tensor > 1 and divides else (False,)
        engines: list[tuple[int, bool]] = []  # ZeRO stage, whether it is FSDP
        for stage in _zero_stages(tensor * context, pipeline, data * context):
            engines.append((stage, False))
        if pipeline == 1 and data * context > 1 and not PRECISIONS[request.precision].scales_loss:
            engines.append((0, True))
        # Ranks with more experts than others would decide the time.
        dealt = [size for size in divisors(data) if size == 1 or config.expert_count % size == 0]
        if not config.expert_count or request.precision == "fp16":
            dealt = [1]
        options = product(engines, RECOMPUTE, splits, powers_of_two, dealt)
        for (stage, fsdp), recompute, sequence_parallel, micro_batch, expert in options:
            run = PlannedRun(
                gpus=request.gpus,
                global_batch=request.global_batch,
                micro_batch=micro_batch,
                length=request.length,
                target_length=request.target_length or 0,
                tensor=tensor,
                pipeline=pipeline,
                recompute=recompute,
                sequence_parallel=sequence_parallel,
                zero_stage=stage,
                fsdp=fsdp,
                itemsize=itemsize,
                gradient_itemsize=itemsize,
                context=context,
                expert=expert,
            )
            if _is_accepted(run, request):
                yield run


def _splits_lengths(request: PlanRequest, ranks: int) -> bool:
    """Returns whether so many ranks may share the sequences."""
    lengths = (request.length, request.target_length or 0)
    if any(length % ranks for length in lengths):
        return False
    return ranks == 1 or request.length // ranks >= FEWEST_POSITIONS


def _has_equal_stages(model: Any, stages: int) -> bool:
    try:
        return bool(split_blocks_evenly(model, stages))
    except ValueError:
        return False


def _zero_stages(split: int, pipeline: int, replicas: int) -> tuple[int, ...]:
    """Returns the ZeRO stages worth trying.

    More than 1 saves nothing without replicas, and 3 is for data parallelism alone.

    Args:
        split: The tensor-parallel size times the context-parallel size.
    """
    if pipeline > 1 or replicas == 1:
        return (1,)
    return (1, 2) if split > 1 else (1, 2, 3)


def _is_accepted(run: PlannedRun, request: PlanRequest) -> bool:
    try:
        build_estimate_job(run, request)
    except ValueError:
        return False
    return True
