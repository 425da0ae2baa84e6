"""What an engine keeps of parameters and gradients, in bytes, given how many elements a rank has and trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .job import Job
from .model import ModelMemory
from .optimizers import FP32, state_bytes, step_bytes

ZERO_BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size
ZERO_3_GATHERED = 50_000_000  # elements: DeepSpeed's prefetch_bucket_size
DDP_FIRST_USE = 1  # DistributedDataParallel's buckets together are as large as the gradients


@dataclass(frozen=True)
class EngineMemory:
    """parameters, masters, states: always there. held: gradients that micro-batches before this one left. grown: of
    gradients that a backward pass adds, for each byte's worth of trained elements in the model's precision. stepped:
    gradients while the optimizer updates. buffers: of collectives, always or in backward. temporaries: of the update.
    """

    parameters: int
    masters: int
    states: int
    held: int
    grown: float
    stepped: int
    buffers: int
    temporaries: int


def engine_memory(model: ModelMemory, job: Job) -> EngineMemory:
    """Of the engine that the trainer takes for the job."""
    if job.stage is None:
        return _torch(model, job)
    return _replicated(model, job) if job.stage == 0 else _zero(model, job)


def _torch(model: ModelMemory, job: Job) -> EngineMemory:
    """PyTorch alone, or with DistributedDataParallel."""
    trained = sum(size.local for size in model.trained)
    wide = job.itemsize == FP32
    accumulates = job.accumulation_steps > 1
    return EngineMemory(
        parameters=sum(size.local for size in model.parameters) * job.itemsize,
        masters=0 if wide else FP32 * trained,
        states=state_bytes(job.optimizer, [size.local_shape for size in model.trained]),
        held=FP32 * trained if accumulates else 0,
        grown=0.0 if accumulates and wide else 1.0,
        stepped=FP32 * trained,
        buffers=job.itemsize * trained if job.data_parallel_size > 1 else 0,
        temporaries=step_bytes(job.optimizer, [size.local for size in model.trained], job.device),
    )


def _replicated(model: ModelMemory, job: Job) -> EngineMemory:
    """DeepSpeed without ZeRO, in fp32: gradients are summed in flat copies."""
    plain = _torch(model, job)
    trained = sum(size.local for size in model.trained)
    return EngineMemory(**{**vars(plain), "buffers": FP32 * min(trained, ZERO_BUCKET)})


def _zero(model: ModelMemory, job: Job) -> EngineMemory:
    """ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 and 7)."""
    stage, ranks, e = job.stage or 0, job.data_parallel_size, job.itemsize
    shapes = [size.local_shape for size in model.trained]
    trained = sum(size.local for size in model.trained)
    every = sum(size.local for size in model.parameters)
    own = -(-trained // ranks)
    flat = _flat_groups(shapes, ranks)
    # bf16 under stage 1 is DeepSpeed's BF16_Optimizer: flat fp32 gradients of everything, always.
    always_fp32 = stage == 1 and job.precision == "bf16"
    gradients = trained * e if stage == 1 else own * FP32
    bucket = min(ZERO_BUCKET, trained) if job.device == "cpu" else ZERO_BUCKET  # a CPU has what is touched alone
    if always_fp32:
        held, grown, stepped = FP32 * trained, 0.0, FP32 * trained
    else:
        accumulates = job.accumulation_steps > 1
        held = gradients if accumulates else 0
        grown = 0.0 if accumulates else gradients / (trained * e)
        stepped = gradients + FP32 * max(flat)
    return EngineMemory(
        parameters=every * e if stage < 3 else -(-every // ranks) * e + min(every, ZERO_3_GATHERED) * e,
        masters=FP32 * own,
        states=state_bytes(job.optimizer, [(own,)]),
        held=held,
        grown=grown,
        stepped=stepped,
        buffers=bucket * e if stage > 1 else 0,
        temporaries=step_bytes(job.optimizer, flat, job.device),
    )


def _flat_groups(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[int]:
    """Elements of a rank's flat partitions: of the matrices, which decay, and of the vectors, which do not."""
    from math import prod

    groups = ([shape for shape in shapes if len(shape) > 1], [shape for shape in shapes if len(shape) < 2])
    return [-(-sum(map(prod, group)) // ranks) for group in groups if group]
