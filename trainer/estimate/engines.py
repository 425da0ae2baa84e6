"""The bytes that an engine and its optimizer keep, from the number of elements that a rank has and trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ...models.sizes import ParameterSize
from .job import Job
from .model import ModelMemory

ZERO_BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size
ZERO_3_GATHERED = 50_000_000  # elements: DeepSpeed's prefetch_bucket_size


@dataclass(frozen=True)
class EngineMemory:
    """parameters, masters, states: always there. held: gradients that micro-batches before this one left. grown: of
    gradients that a backward pass adds, for each byte's worth of trained elements in the model's precision. stepped:
    gradients while the optimizer updates. buffers: of collectives, always. bucket: from the first gradient to the last.
    temporaries: of the update.
    """

    parameters: int
    masters: int
    states: int
    held: int
    grown: float
    stepped: int
    buffers: int
    bucket: int
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
    groups = [[size.local for size in group] for group in _groups(model)]
    return EngineMemory(
        parameters=sum(size.local for size in model.parameters) * job.itemsize,
        masters=0 if wide else FP32 * trained,
        states=state_bytes(job.optimizer, [size.local_shape for size in model.trained]),
        held=FP32 * trained if accumulates else 0,
        grown=0.0 if accumulates and wide else 1.0,
        stepped=FP32 * trained,
        buffers=job.itemsize * trained if job.data_parallel_size > 1 else 0,  # DDP's buckets
        bucket=0,
        temporaries=step_bytes(job.optimizer, groups),
    )


def _replicated(model: ModelMemory, job: Job) -> EngineMemory:
    """DeepSpeed without ZeRO, in fp32: gradients are summed in flat copies."""
    plain = _torch(model, job)
    trained = sum(size.local for size in model.trained)
    return replace(plain, buffers=FP32 * min(trained, ZERO_BUCKET))


def _zero(model: ModelMemory, job: Job) -> EngineMemory:
    """ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 and 7)."""
    stage, ranks, e = job.stage or 0, job.data_parallel_size, job.itemsize
    trained = sum(size.local for size in model.trained)
    every = sum(size.local for size in model.parameters)
    own = -(-trained // ranks)
    flat = [-(-sum(size.local for size in group) // ranks) for group in _groups(model)]
    # bf16 under stage 1 is DeepSpeed's BF16_Optimizer: flat fp32 gradients of everything, always.
    always_fp32 = stage == 1 and job.precision == "bf16"
    gradients = trained * e if stage == 1 else own * FP32
    if always_fp32:
        held, grown, stepped, bucket = FP32 * trained, 0.0, FP32 * trained, 0
    else:
        accumulates = job.accumulation_steps > 1
        held = gradients if accumulates else 0
        grown = 0.0 if accumulates else gradients / (trained * e)
        stepped = gradients + FP32 * max(flat)
        # Gradients are copied into a bucket, of which a CPU has what was written to, and a GPU has it all.
        bucket = ZERO_BUCKET * e if job.device == "cuda" else 0
        grown += 1.0 if job.device == "cpu" else 0.0
    return EngineMemory(
        parameters=every * e if stage < 3 else -(-every // ranks) * e + min(every, ZERO_3_GATHERED) * e,
        masters=FP32 * own,
        states=state_bytes(job.optimizer, [(own,)]),
        held=held,
        grown=grown,
        stepped=stepped,
        buffers=0,
        bucket=bucket,
        temporaries=step_bytes(job.optimizer, [[size] for size in flat]),
    )


def _groups(model: ModelMemory) -> list[list[ParameterSize]]:
    """The optimizer's groups: the matrices, which decay, and the vectors, which do not."""
    matrices = [size for size in model.trained if len(size.shape) > 1]
    vectors = [size for size in model.trained if len(size.shape) < 2]
    return [group for group in (matrices, vectors) if group]


STATE_BYTES = {"adamw": 8, "lamb": 8, "lion": 4}
"""For each element, in fp32: two moments (Loshchilov & Hutter 2019; You et al. 2020), or one (Chen et al. 2023)."""
FP32 = 4


def state_bytes(optimizer: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Of parameters of these shapes.

    Adafactor (Shazeer & Stern 2018, section 3) keeps a row's and a column's mean of each matrix's squared gradients,
    and those of a vector whole.
    """
    if optimizer == "adafactor":
        return FP32 * sum(map(_factored, shapes))
    return STATE_BYTES[optimizer] * sum(map(prod, shapes))


def step_bytes(optimizer: str, groups: Sequence[Sequence[int]]) -> int:
    """Temporary fp32 tensors while parameters of so many elements, group by group, are updated.

    AdamW is fused and needs none. transformers' Adafactor needs two of a parameter's size at once, pytorch_optimizer's
    Lion and LAMB one for each parameter of a group, which they update together.
    """
    if optimizer == "adafactor":
        return 2 * FP32 * max((size for group in groups for size in group), default=0)
    return FP32 * max(map(sum, groups), default=0) if optimizer in ("lion", "lamb") else 0


def _factored(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
