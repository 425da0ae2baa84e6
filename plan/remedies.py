"""Finds what makes a job fit a device's memory, and what each such change costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, get_args

from ..models.auto import unsplit_on_meta
from ..models.config import ModelConfig
from ..models.parallel_config import Recompute
from ..models.sizes import largest_size
from ..mpu.division import divisors
from ..trainer.estimate import Job, estimate
from .cost import Network, PlannedRun, step_time
from .hardware import find_cluster
from .layouts import build_network


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


def find_remedies(config: ModelConfig, job: Job, memory: float) -> list[Remedy]:
    """Returns what makes a job need at most `memory` bytes.

    Recomputation, ZeRO and FSDP, smaller micro-batches with as many more of them, tensor parallelism over
    further devices, sequence parallelism, and Adafactor are tried alone and together. A remedy that
    does more than another one is left out.

    Returns:
        The cheapest first; those with another optimizer always come last.
    """
    network = build_network(config)
    ladders = _build_ladders(config, job)
    time_before = _device_time(network, job)
    # A remedy is found by how far it climbs each ladder; 0 leaves a ladder alone.
    found: dict[tuple[int, ...], Remedy] = {}
    for count in range(1, len(ladders) + 1):
        for chosen in combinations(range(len(ladders)), count):
            heights = [range(1, len(ladders[number]) + 1) for number in chosen]
            for rungs in product(*heights):
                climbed = dict(zip(chosen, rungs, strict=True))
                place = tuple(climbed.get(number, 0) for number in range(len(ladders)))
                if any(_is_milder(other, place) for other in found):
                    continue
                changes: dict[str, Any] = {}
                for number, rung in climbed.items():
                    changes |= ladders[number][rung - 1]
                fitting = _apply_if_it_fits(config, job, changes, memory)
                if fitting is not None:
                    changed, needed = fitting
                    cost = _device_time(network, changed) / time_before
                    found[place] = Remedy(changes, needed, cost)
    return sorted(
        found.values(),
        key=lambda remedy: ("optimizer" in remedy.changes, remedy.cost, remedy.memory),
    )


def _is_milder(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether one remedy climbs no ladder further than another."""
    return all(a <= b for a, b in zip(one, other, strict=True))


def _build_ladders(config: ModelConfig, job: Job) -> list[Ladder]:
    stronger_recompute = get_args(Recompute)[get_args(Recompute).index(job.recompute) + 1 :]
    splits: list[dict[str, Any]] = []
    if job.data_parallel_size > 1 and not job.fsdp:
        splits += [{"zero_stage": stage} for stage in range((job.stage or 0) + 1, 4)]
        # Also beside tensor parallelism, where ZeRO 3 is refused.
        splits.append({"fsdp": True})
    batch = job.micro_batch_size
    smaller_batches = [size for size in reversed(divisors(batch)) if size < batch]
    widest = min(largest_size(unsplit_on_meta(config)), find_cluster("a100").node_size)
    wider = [factor * job.tensor_parallel_size for factor in (2, 4, 8)]
    ladders: list[Ladder] = [
        [{"recompute": value} for value in stronger_recompute],
        splits,
        [
            {"micro_batch_size": size, "accumulation_steps": job.accumulation_steps * batch // size}
            for size in smaller_batches
        ],
        [{"tensor_parallel_size": size} for size in wider if size <= widest],
        [] if job.sequence_parallel else [{"sequence_parallel": True}],
        [] if job.optimizer == "adafactor" else [{"optimizer": "adafactor"}],
    ]
    return [ladder for ladder in ladders if ladder]


def _apply_if_it_fits(
    config: ModelConfig, job: Job, changes: dict[str, Any], memory: float
) -> tuple[Job, int] | None:
    """Returns the changed job and its bytes.

    Returns None if the trainer refuses the job or if it needs more than `memory`.
    """
    try:
        changed = replace(job, **changes)
        if changed.sequence_parallel and not _can_split_sequences(changed):
            return None
        needed = estimate(config, changed).peak.total
    except ValueError:
        return None
    return (changed, needed) if needed <= memory else None


def _can_split_sequences(job: Job) -> bool:
    """Returns whether there are several tensor-parallel ranks, among which a sequence divides."""
    ranks = job.tensor_parallel_size
    parts = ranks * job.context_parallel_size
    lengths = (job.length, job.target_length or 0)
    return ranks > 1 and not any(length % parts for length in lengths)


def _device_time(network: Network, job: Job) -> float:
    """Returns the predicted seconds of all devices for one sequence, on A100 or on CPUs."""
    gpus = job.tensor_parallel_size * job.pipeline_parallel_size * job.replicas
    data = job.data_parallel_size * job.expert_parallel_size
    batch = job.micro_batch_size * job.accumulation_steps * data
    run = PlannedRun(
        gpus=gpus,
        global_batch=batch,
        micro_batch=job.micro_batch_size,
        length=job.length,
        target_length=job.target_length or 0,
        tensor=job.tensor_parallel_size,
        pipeline=job.pipeline_parallel_size,
        recompute=job.recompute,
        sequence_parallel=job.sequence_parallel,
        zero_stage=job.stage or 0,
        fsdp=job.fsdp,
        itemsize=job.itemsize,
        gradient_itemsize=job.itemsize,
        context=job.context_parallel_size,
        expert=job.expert_parallel_size,
    )
    cluster = find_cluster("a100" if job.device == "cuda" else "cpu")
    return step_time(network, run, cluster).total * gpus / batch
