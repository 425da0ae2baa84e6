"""Estimates the peak memory of a training step: what the engine keeps, and the moments that can be
the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...models.config import ModelConfig
from ...models.sizes import ParameterSize
from ...mpu.divergence import PIECE
from ..engines.buckets import bucket_elements
from ..optimizers.registry import OptimizerEntry, UpdatedTensors, find_optimizer
from .model import Job, ModelMemory, hf_model_memory, model_memory
from .pipeline import stage_memory

MIB = 1 << 20
FRAMEWORK = {"cuda": 600 * MIB, "cpu": 400 * MIB}
"""Memory outside of tensors: the CUDA context, kernels and cuBLAS's workspaces, or Python and its
imports."""
DIVERGENCE_TENSORS = 5  # that the divergence from a teacher computes on the way
PEFT = 150 * MIB
"""What importing peft, and with it transformers' models, adds to a CPU process."""
LARGEST_MICRO_BATCH = 1 << 20


@dataclass(frozen=True)
class Moment:
    """A moment of a training step, with the bytes in use by purpose."""

    name: str
    lines: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.lines.values())


@dataclass(frozen=True)
class Estimate:
    """The memory of one rank.

    Attributes:
        parameters: Elements of all parameters, with the padding of a vocabulary.
        trained: Elements of those that are trained.
        moments: The moments of a step.
        padding: Elements that belong to no row of the vocabulary.
    """

    parameters: int
    trained: int
    moments: tuple[Moment, ...]
    padding: int = 0

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def estimate(config: ModelConfig | Any, job: Job) -> Estimate:
    """Estimates the memory of one rank, of a pipeline in the stage that needs most.

    Raises ValueError if the trainer would refuse the job or the model forbids it.

    `config` belongs to a family of the zoo, or is transformers' configuration of another decoder.
    """
    return max(estimate_stages(config, job), key=lambda found: found.peak.total)


def estimate_stages(config: ModelConfig | Any, job: Job) -> list[Estimate]:
    """Estimates the memory of one rank of each pipeline stage. See `estimate`."""
    if not isinstance(config, ModelConfig):
        return [estimate_rank(hf_model_memory(config, job), job)]
    memory = model_memory(config, job)
    if job.pipeline_parallel_size == 1:
        return [estimate_rank(memory, job)]
    stages = range(job.pipeline_parallel_size)
    return [estimate_rank(stage_memory(memory, config, job, stage), job) for stage in stages]


def estimate_rank(model: ModelMemory, job: Job) -> Estimate:
    """Estimates the memory of one rank from the memory of its model."""
    engine = engine_memory(model, job)
    return Estimate(
        parameters=sum(size.local for size in model.parameters),
        trained=sum(size.local for size in model.trained),
        moments=tuple(_moments(model, engine, job)),
        padding=sum(size.padding for size in model.parameters),
    )


def largest_micro_batch(fits: Callable[[int], bool]) -> int:
    """Returns the largest micro-batch for which `fits` is true, or 0.

    Above some size `fits` must always be false.
    """
    if not fits(1):
        return 0
    low = 1
    high = 2
    while high < LARGEST_MICRO_BATCH and fits(high):
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _moments(model: ModelMemory, engine: EngineMemory, job: Job) -> list[Moment]:
    """Returns the moments of a step that can be the peak, in their order."""
    e = job.itemsize

    def grown(sizes: Sequence[ParameterSize]) -> int:
        """Returns the bytes of gradients that the backward pass of parameters adds."""
        return round(engine.grown * e * sum(size.local for size in sizes))

    framework = FRAMEWORK[job.device]
    if job.lora_rank and job.device == "cpu":
        framework += PEFT
    fixed = {
        "parameters": engine.parameters,
        "fp32 master weights": engine.masters,
        "optimizer state": engine.states,
        "framework": framework,
    }
    copied = _count_checkpoint_bytes(model, engine, job)
    if copied:
        fixed["copy for checkpoints"] = copied
    teacher_logits = 0
    if model.teacher is not None:
        fixed["teacher"] = model.teacher.parameters
        teacher_logits = model.teacher.logits

    def at(
        name: str,
        gradients: int,
        activations: int = 0,
        logits: int = 0,
        working: int = 0,
        bucket: int = engine.bucket,
    ) -> None:
        lines = {
            "gradients": gradients,
            "communication buffers": engine.buffers + bucket,
            "activations": activations,
            "logits and loss": logits,
            "temporary tensors": working,
        }
        moments.append(Moment(name, fixed | lines))

    # If the head or the decoder uses the embedding table again, its gradient exists from there
    # until the backward pass of the first embedding. If gradients grow during the backward pass,
    # the head's is counted among them.
    table = e * model.table.local if model.table else 0
    sums_table = not engine.grown and not job.fsdp  # FSDP gathers the table with its gradient
    from_head = table if model.is_tied and sums_table else 0
    from_decoder = table if not model.is_tied else 0

    moments: list[Moment] = []
    kept = [part.layers * part.block.kept for part in model.parts]
    head = (model.head,) if model.head else ()
    if model.teacher is not None:
        at(
            "the teacher's forward",
            engine.held,
            sum(kept) + model.ends,
            model.logits + teacher_logits,
            model.teacher.forward,
            bucket=0,
        )
        # Beside the loss's own gradient, the divergence keeps the student's logits, and has a
        # gradient for them, which it computes in pieces.
        elements = model.logits // e
        teacher_logits += 2 * model.logits + DIVERGENCE_TENSORS * FP32 * min(PIECE, elements)
    at(
        "the loss's backward",
        engine.held,
        sum(kept) + model.ends,
        model.logits + teacher_logits + model.loss,
        bucket=0,
    )
    at(
        "the head's backward",
        engine.held + grown(head),
        sum(kept) + model.ends,
        model.logits + teacher_logits,
        model.stream + from_head,
    )
    gradients = engine.held + grown(head)
    for number in reversed(range(len(model.parts))):
        part = model.parts[number]
        before = sum(kept[:number])
        used_again = number < len(model.parts) - 1
        working = part.block.working + from_head + (from_decoder if used_again else 0)
        at("the last block's backward", gradients, before + kept[number] + model.ends, 0, working)
        gradients += grown(part.parameters)
        at(
            "the first block's backward",
            gradients,
            before + part.block.kept + model.ends,
            0,
            working,
        )
    everything = engine.held + grown(model.trained)
    at(
        "the embedding's backward",
        everything,
        0,
        0,
        (table if sums_table else 0) + model.pieces * table,
    )
    at("the optimizer's step", engine.stepped, 0, 0, engine.temporaries, bucket=0)
    return moments


def _count_checkpoint_bytes(model: ModelMemory, engine: EngineMemory, job: Job) -> int:
    """Returns the bytes of the copy that a rank writes checkpoints from; on a GPU it is in the
    host's memory.

    The copy of the first checkpoint stays for later ones. The replicas divide what they all have.
    """
    if job.device != "cpu":
        return 0
    stored = model.trained if job.lora_rank else model.parameters
    weights = job.itemsize * sum(size.local for size in stored)
    states = engine.masters + engine.states
    if not job.fsdp and job.stage in (None, 0):
        states //= job.replicas
    return weights // job.replicas + states


ZERO_0_BUCKET = 500_000_000  # elements that DeepSpeed sums at once without ZeRO
ZERO_3_GATHERED = 50_000_000  # elements: DeepSpeed's prefetch_bucket_size


@dataclass(frozen=True)
class EngineMemory:
    """The memory of an engine, in bytes.

    Attributes:
        parameters, masters, states: Parameters, fp32 master weights and optimizer state; they
            always exist.
        held: Gradients that earlier micro-batches have left.
        grown: Gradients that a backward pass adds, per byte of trained parameters in the model's
            precision.
        stepped: Gradients while the optimizer updates.
        buffers: Buffers of collectives that always exist.
        bucket: Buffers of collectives that exist from the first gradient of a step to the last.
        temporaries: Temporary tensors of the update.
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
    """Returns the memory of the engine that the trainer uses for the job."""
    if job.fsdp:
        return _fsdp_memory(model, job)
    if job.stage is None:
        return _torch_memory(model, job)
    if job.stage == 0:
        return _deepspeed_without_zero_memory(model, job)
    return _zero_memory(model, job)


def _torch_memory(model: ModelMemory, job: Job) -> EngineMemory:
    """Returns the memory of plain PyTorch, or of DistributedDataParallel."""
    trained = sum(size.local for size in model.trained)
    wide = job.itemsize == FP32
    accumulates = job.accumulation_steps > 1
    groups = [[size.local for size in group] for group in _groups(model)]
    padded = any(size.local_shape != size.shape for size in model.trained)
    optimizer = find_optimizer(job.optimizer)
    in_parts = job.tensor_parallel_size > 1 or (padded and optimizer.padding_matters)
    memory = EngineMemory(
        parameters=model.count_parameter_bytes(job.itemsize),
        masters=0 if wide else FP32 * trained,
        states=state_bytes(optimizer, model.trained),
        held=FP32 * trained if accumulates else 0,
        grown=0.0 if accumulates and wide else 1.0,
        stepped=FP32 * trained,
        buffers=job.itemsize * trained if job.replicas > 1 else 0,  # DDP's buckets
        bucket=0,
        temporaries=FP32 * optimizer.count_temporaries(UpdatedTensors(groups, in_parts)),
    )
    if not job.optimizer_in_backward:
        return memory
    largest = max((size.local for size in model.trained), default=0)
    gradient = FP32 * largest
    if not wide:  # the parameter's own beside the master weight's
        gradient += job.itemsize * largest
    alone = UpdatedTensors([[largest]], in_parts)
    return _free_gradients(memory, gradient + FP32 * optimizer.count_temporaries(alone))


def _free_gradients(memory: EngineMemory, held: int) -> EngineMemory:
    """Returns the memory of an engine that frees each gradient when it has updated the parameter.

    Args:
        held: Bytes of the gradients that exist at a time, and of what their update needs.
    """
    return replace(memory, held=held, grown=0.0, stepped=held, temporaries=0)


def _fsdp_memory(model: ModelMemory, job: Job) -> EngineMemory:
    """Returns the memory of torch's FSDP2, which gathers a block at a time (Zhao et al. 2023,
    arXiv:2304.11277).

    What is outside of the blocks stays gathered, with its gradient, until the backward pass ends.
    """
    every = sum(size.local for size in model.parameters)
    trained = sum(size.local for size in model.trained)
    own = job.share(model.trained)
    e = job.itemsize
    in_blocks = 0
    frozen_in_blocks = 0
    block = 0  # bytes that the largest one takes while it is whole
    most_in_block = 0
    for part in model.parts:
        elements = sum(size.local for size in part.parameters)
        in_blocks += elements
        frozen_in_blocks += part.frozen
        gradients = -(-elements // max(1, part.layers))
        weights = gradients + -(-part.frozen // max(1, part.layers))
        most_in_block = max(most_in_block, gradients)
        if job.device == "cpu":
            # The weights are freed before the gradients are copied to the fp32 buffer of the sum.
            block = max(block, e * (weights + gradients), (e + FP32) * gradients)
        else:
            # The sum of the block before may still be on its way.
            block = max(block, e * (weights + gradients) + FP32 * gradients)
    outside = max(0, trained - in_blocks)
    frozen_outside = max(0, every - trained - frozen_in_blocks)
    # A rank has fp32 rows; what is gathered has the precision of the forward pass.
    gathered = e * (2 * outside + frozen_outside) + block
    optimizer = find_optimizer(job.optimizer)
    groups = [[job.share([size]) for size in group] for group in _groups(model)]
    largest = max((size.local for size in model.trained), default=0)
    updated = UpdatedTensors(groups, in_parts=True, largest_parameter=largest)
    accumulates = job.accumulation_steps > 1
    memory = EngineMemory(
        parameters=FP32 * job.share(model.parameters),
        masters=0,
        states=state_bytes(optimizer, model.trained, own),
        held=FP32 * own if accumulates else 0,
        grown=0.0 if accumulates else FP32 * own / max(1, trained * job.itemsize),
        stepped=FP32 * own,
        buffers=0,
        bucket=gathered,
        temporaries=FP32 * optimizer.count_temporaries(updated),
    )
    if not job.optimizer_in_backward:
        return memory
    # The gradients of a block are exchanged together, and then those of what is outside.
    ranks = job.expert_replicas if job.expert_parallel_size > 1 else job.replicas
    rows = -(-max(outside, most_in_block) // ranks)
    alone = UpdatedTensors([[-(-largest // ranks)]], in_parts=True, largest_parameter=largest)
    return _free_gradients(memory, FP32 * (rows + optimizer.count_temporaries(alone)))


def _deepspeed_without_zero_memory(model: ModelMemory, job: Job) -> EngineMemory:
    """Returns the memory of DeepSpeed without ZeRO: gradients are summed in flat fp32 copies."""
    plain = _torch_memory(model, job)
    trained = sum(size.local for size in model.trained)
    return replace(plain, buffers=FP32 * min(trained, ZERO_0_BUCKET))


def _zero_memory(model: ModelMemory, job: Job) -> EngineMemory:
    """Returns the memory of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 and 7)."""
    stage = job.stage or 0
    ranks = job.replicas
    e = job.itemsize
    trained = sum(size.local for size in model.trained)
    every = sum(size.local for size in model.parameters)
    own = job.share(model.trained)
    largest = max((size.local for size in model.trained), default=0)
    flat = [job.share(group) for group in _groups(model)]
    optimizer = find_optimizer(job.optimizer)
    updated = UpdatedTensors([[size] for size in flat], in_parts=True, largest_parameter=largest)
    exchanges_early = ranks > 1 and job.pipeline_parallel_size == 1
    if stage == 1 and job.precision == "bf16" and not exchanges_early:
        # DeepSpeed's BF16_Optimizer always keeps flat fp32 gradients of everything.
        held = FP32 * trained
        grown = 0.0
        stepped = FP32 * trained
        bucket = 0
    else:
        accumulates = job.accumulation_steps > 1
        wide = e if stage == 1 and job.precision == "fp16" else FP32  # of sums over micro-batches
        # A rank keeps its share of the gradients where they are exchanged in the backward pass.
        gradients = wide * trained
        if exchanges_early or stage > 1:
            gradients = wide * own
        held = 0
        grown = gradients / (trained * e)
        if accumulates:
            held = wide * trained if stage == 1 else gradients
            grown = 0.0
        stepped = gradients + FP32 * max(flat)
        # Gradients are copied into a bucket, or into two in turn. A CPU allocates only the pages
        # that are written to.
        bucket = bucket_elements(trained, ranks) * (wide if stage == 1 else e)
        if exchanges_early and stage < 3:
            bucket *= 2
        if job.device == "cpu":
            bucket = min(bucket, wide * trained)
    parameters = model.count_parameter_bytes(e)
    if stage == 3:
        parameters = -(-every // ranks) * e + min(every, ZERO_3_GATHERED) * e
    return EngineMemory(
        parameters=parameters,
        masters=FP32 * own,
        states=state_bytes(optimizer, model.trained, own),
        held=held,
        grown=grown,
        stepped=stepped,
        buffers=0,
        bucket=bucket,
        temporaries=FP32 * optimizer.count_temporaries(updated),
    )


def _groups(model: ModelMemory) -> list[list[ParameterSize]]:
    """Returns the optimizer's groups: the matrices, which decay, and the vectors, which do not."""
    matrices = [size for size in model.trained if len(size.shape) > 1]
    vectors = [size for size in model.trained if len(size.shape) < 2]
    return [group for group in (matrices, vectors) if group]


FP32 = 4  # bytes


def state_bytes(
    optimizer: OptimizerEntry, trained: Sequence[ParameterSize], own: int | None = None
) -> int:
    """Returns the bytes of optimizer state on a rank, in fp32.

    Args:
        own: The number of elements that the rank updates under ZeRO; by default all trained ones.
    """
    if optimizer.count_state_bytes is not None:
        return sum(optimizer.count_state_bytes(size.local) for size in trained)
    if optimizer.count_matrix_state is not None:
        elements = 0
        for size in trained:
            is_matrix = len(size.shape) > 1
            elements += optimizer.count_matrix_state(size.shape) if is_matrix else size.local
        return FP32 * elements
    every = sum(size.local for size in trained)
    if own is None:
        own = every
    elements = len(optimizer.element_states) * own
    if optimizer.hidden_matrix_states is not None:
        # They are dealt to the ranks like the others.
        hidden = sum(size.local for size in trained if size.is_hidden_matrix)
        difference = len(optimizer.hidden_matrix_states) - len(optimizer.element_states)
        elements += round(difference * hidden * own / max(1, every))
    return FP32 * elements
