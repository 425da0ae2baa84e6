"""Computes the memory of a model's parameters and activations, for the zoo's families and other
transformers models.

A family of the zoo has a table of the tensors that a block keeps for the backward pass. Any other
model is measured without weights, on the meta device: saved-tensor hooks count what autograd keeps,
once for the whole model and once without its blocks. Its attention is transformers' "eager"
implementation, all of whose matmuls are visible. Fused attention keeps less.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...models.activations import (
    FP32,
    Batch,
    BlockBytes,
    Layout,
    StackSpec,
    block_bytes,
    end_bytes,
    head_sum_bytes,
    logit_bytes,
)
from ...models.auto import build_on_meta, model_class, unsplit_on_meta
from ...models.blocks.moe import check_experts
from ...models.config import ModelConfig
from ...models.language_model import LanguageModel
from ...models.lora import attach_factors, lora_config
from ...models.packing import find_packed_matrices
from ...models.parallel_config import ContextExchange, ParallelConfig, Recompute
from ...models.registry import family
from ...models.sizes import ParameterSize, is_embedding, measure_parameters
from ...mpu.packed import PIECE_BYTES, count_packed_bytes
from ...ops.packing import PackedFormat
from ..engines.precision import DTYPES
from ..optimizers.registry import ELEMENTWISE_NAMES, LONE_STEP_NAMES, OptimizerName, find_optimizer
from ..precisions import PRECISIONS, PrecisionName


@dataclass(frozen=True)
class BlockStack:
    """Equal blocks of a model: their number, the memory of one block, the trained parameters of all
    blocks, and the number of elements in their frozen ones.
    """

    layers: int
    block: BlockBytes
    parameters: tuple[ParameterSize, ...]
    frozen: int = 0


@dataclass(frozen=True)
class TeacherMemory:
    """What a teacher needs on a rank, in bytes.

    Attributes:
        parameters: Its weights, in the student's precision.
        forward: Its forward pass, which keeps nothing for a backward pass.
        logits: Its logits, and the columns of them that the student's layout has.
    """

    parameters: int
    forward: int
    logits: int


@dataclass(frozen=True)
class ModelMemory:
    """The parameters and activations of a model.

    Attributes:
        parts: The stacks of blocks, in the order of the forward pass.
        logits: Bytes of the logits, and also of their gradient.
        loss: Largest number of bytes in use besides the logits during the loss's backward pass.
        ends: Bytes of other activations kept outside the blocks.
        head: The weight that computes the logits, if it is trained.
        table: The weight of the token embedding, if it is trained.
        stream: Bytes of one tensor [B, S, H].
        pieces: Number of copies of the table's gradient that are added up at the end.
        packed: The bytes of packed parameters, by name.
        teacher: That of a teacher; None without one.
    """

    parameters: tuple[ParameterSize, ...]
    trained: tuple[ParameterSize, ...]
    parts: tuple[BlockStack, ...]
    logits: int
    loss: int
    ends: int
    head: ParameterSize | None
    table: ParameterSize | None
    stream: int
    pieces: int = 0
    packed: Mapping[str, int] = field(default_factory=dict)
    teacher: TeacherMemory | None = None

    def count_parameter_bytes(self, itemsize: int) -> int:
        """Returns the bytes of the parameters of a rank."""
        unpacked = sum(size.local for size in self.parameters if size.name not in self.packed)
        return unpacked * itemsize + sum(self.packed.values())

    @property
    def is_tied(self) -> bool:
        return self.table is not None and self.table is self.head


def model_memory(config: ModelConfig, job: Job) -> ModelMemory:
    """Returns the memory of one rank, for a family of the zoo.

    Raises ValueError if the model does not allow this sequence length or tensor-parallel size.
    """
    sizes, trained, packed = _measure_parameters_of_family(config, job)
    unpacking = 0  # bytes of the largest packed matrix while it is unpacked
    if job.base_precision is not None:
        largest = max((size.local for size in sizes if size.name in packed), default=0)
        unpacking = largest * job.itemsize + min(PIECE_BYTES, 8 * largest)
    activations = family(config.model_type).activations(config)
    # An architecture that is an encoder alone has no decoder's parameters.
    owned = []
    for stack in activations.stacks:
        if any(size.name.startswith(stack.path) for size in sizes):
            owned.append(stack)
    activations = replace(activations, stacks=tuple(owned))
    has_target = any(stack.is_decoder for stack in activations.stacks)
    batch = job.batch(has_target=has_target)
    layout = job.layout
    if not has_target and job.length > config.max_sequence_length:
        raise ValueError(
            f"length {job.length} is more than the model's {config.max_sequence_length} positions"
        )
    parts = []
    for stack in activations.stacks:
        own = tuple(size for size in trained if size.name.startswith(stack.path))
        in_block = block_bytes(stack, batch, layout)
        if job.gathers_keys(stack.block.heads):
            in_block = replace(in_block, kept=in_block.kept + _gathered_bytes(stack, batch, job))
        in_block = replace(in_block, working=in_block.working + unpacking)
        every = sum(size.local for size in sizes if size.name.startswith(stack.path))
        frozen = every - sum(size.local for size in own)
        parts.append(BlockStack(stack.layers, in_block, own, frozen))
    table = next(size for size in sizes if size.name.endswith("word_embeddings.weight"))
    head = next((size for size in sizes if size.name.endswith("head.weight")), table)
    logits = 0
    loss = 0
    trained_head: ParameterSize | None = None
    # The logits of heads that predict something else are small.
    if issubclass(model_class(config), LanguageModel):
        logits = logit_bytes(head.local_shape[0], batch, layout)
        # The gradient of the logits overwrites them.
        trained_head = head if head in trained else None
        is_trained = trained_head is not None
        loss = head_sum_bytes(head.local_shape, batch, layout, is_trained=is_trained)
    positions = batch.size * max(batch.length, batch.target_length)
    return ModelMemory(
        parameters=tuple(sizes),
        trained=tuple(trained),
        parts=tuple(parts),
        logits=logits,
        loss=loss,
        ends=end_bytes(activations, batch, layout),
        head=trained_head,
        table=table if table in trained else None,
        stream=positions * activations.stacks[0].block.hidden * job.itemsize,
        packed=packed,
        teacher=None if job.teacher is None else _measure_teacher(job, logits),
    )


def _measure_teacher(job: Job, student_logits: int) -> TeacherMemory:
    """Returns the memory of the job's teacher.

    Args:
        student_logits: The bytes of the student's logits, which the teacher's get the layout of.
    """
    ranks = job.teacher_parallel_size or job.tensor_parallel_size
    own = replace(
        job,
        teacher=None,
        teacher_parallel_size=None,
        tensor_parallel_size=ranks,
        sequence_parallel=job.sequence_parallel and ranks == job.tensor_parallel_size,
        recompute="none",
        lora_rank=0,
        base_precision=None,
        frozen=(),
    )
    assert job.teacher is not None
    memory = model_memory(job.teacher, own)
    # Without a backward pass, what is left of a block is its output. The feed-forward block has the
    # largest moment: its input before and after the norm, and its features before and after the
    # activation.
    outputs = sum(part.layers for part in memory.parts) * memory.stream
    stacks = family(job.teacher.model_type).activations(job.teacher).stacks
    widths: list[float] = []
    for stack in stacks:
        features = stack.block.feed_forward / ranks
        widths.append((3 if stack.block.gated else 2) * features / stack.block.hidden)
    forward = outputs + round((2 + max(widths)) * memory.stream)
    moved = student_logits if ranks != job.tensor_parallel_size else 0
    return TeacherMemory(memory.count_parameter_bytes(job.itemsize), forward, memory.logits + moved)


def _gathered_bytes(stack: StackSpec, batch: Batch, job: Job) -> int:
    """Returns the bytes of the keys and values that a block keeps of other context-parallel ranks."""
    block = stack.block
    positions = batch.target_length if stack.is_decoder else batch.length
    if block.cross:
        positions += batch.length
    heads = -(-(block.key_value_heads or block.heads) // job.tensor_parallel_size)
    others = job.context_parallel_size - 1
    return 2 * batch.size * positions * others * heads * block.head_size * job.itemsize


def _measure_parameters_of_family(
    config: ModelConfig, job: Job
) -> tuple[list[ParameterSize], list[ParameterSize], dict[str, int]]:
    """Returns the sizes of all parameters, with those of LoRA weights, and of the trained ones, and
    the bytes of packed ones by name.
    """
    if job.lora_rank:
        model = build_on_meta(config, None)
        config_of_lora = lora_config(
            r=job.lora_rank,
            target_modules=job.lora_target_modules or None,
            target_parameters=list(job.lora_target_parameters) or None,
        )
        attach_factors(model, config_of_lora)
    else:
        model = unsplit_on_meta(config)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    check_experts(config, job.expert_parallel_size)
    sizes = measure_parameters(model, job.tensor_parallel_size, job.expert_parallel_size)
    trained: list[ParameterSize] = []
    for size in sizes:
        if size.name in trainable and not is_frozen(size, job):
            trained.append(size)
    packed: dict[str, int] = {}
    if job.base_precision is not None:
        names = find_packed_matrices(model)
        for size in sizes:
            if size.name in names:
                packed[size.name] = count_packed_bytes(size.local_shape, job.base_precision)
    return sizes, trained, packed


def is_frozen(size: ParameterSize, job: Job) -> bool:
    """Returns whether the job leaves a parameter untrained."""
    for part in ("encoder", "decoder"):
        if part in job.frozen and size.name.startswith(f"{part}."):
            return True
    return "embeddings" in job.frozen and size.is_embedding


def hf_model_memory(config: Any, job: Job) -> ModelMemory:
    """Returns the memory of a causal language model, from transformers' configuration.

    Raises ValueError if the job needs tensor or sequence parallelism or selective recomputation,
    which models of transformers do not support here, or if the model is not a decoder.
    """
    _refuse_what_is_not_estimated(config, job)
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    model = _build_model_of_transformers(config, job)
    name, blocks = _find_blocks(model, config.num_hidden_layers)
    sizes = _measure_parameters_of_transformers(model)
    trained = tuple(size for size in sizes if not is_frozen(size, job))

    # What the blocks keep is the difference between the model and what is left without them.
    whole, largest = _measure_saved_tensors(model, job)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.ModuleList())
    ends, _ = _measure_saved_tensors(model, job)
    kept = (whole - ends) // len(blocks)

    tokens = job.micro_batch_size * job.length
    stream = tokens * config.hidden_size * job.itemsize
    working = 2 * stream + 2 * largest
    block = BlockBytes(kept, working)
    if job.recompute == "full":
        block = BlockBytes(stream, kept - stream + working)
    in_blocks = tuple(size for size in trained if size.name.startswith(f"{name}."))
    names = {parameter: name for name, parameter in model.named_parameters()}
    trained_by_name = {size.name: size for size in trained}
    head = trained_by_name.get(names[model.get_output_embeddings().weight])
    table = trained_by_name.get(names[model.get_input_embeddings().weight])
    # The loss is computed from an fp32 copy of the logits. The log-softmax of the copy is kept, and
    # has a gradient.
    wide = tokens * config.vocab_size * FP32
    return ModelMemory(
        parameters=tuple(sizes),
        trained=trained,
        parts=(BlockStack(len(blocks), block, in_blocks),),
        logits=tokens * config.vocab_size * job.itemsize,
        loss=2 * wide,
        ends=ends - wide,
        head=head,
        table=table,
        stream=stream,
        pieces=2 if table is not None and table is head else 0,
    )


def _refuse_what_is_not_estimated(config: Any, job: Job) -> None:
    """Raises ValueError for a job or a model of transformers whose memory is not known."""
    kind = config.model_type
    if job.lora_rank:
        raise ValueError("lora_rank and base_precision are for models of the zoo only")
    if job.teacher is not None:
        raise ValueError("a teacher's memory is known beside models of the zoo only")
    if job.tensor_parallel_size > 1 or job.sequence_parallel:
        raise ValueError(
            f"{kind} is not a family of the zoo, so its layers cannot be split; use one "
            "tensor-parallel rank and no sequence parallelism"
        )
    if job.context_parallel_size > 1:
        raise ValueError(
            f"{kind} is not a family of the zoo, so its sequences cannot be split; use one "
            "context-parallel rank"
        )
    if job.expert_parallel_size > 1:
        raise ValueError(
            f"{kind} is not a family of the zoo, so its experts cannot be dealt; use one "
            "expert-parallel rank"
        )
    if job.recompute in ("selective", "offload"):
        raise ValueError(
            f"{kind} is not a family of the zoo; use recompute 'none' or 'full', not "
            f"{job.recompute!r}"
        )
    if config.is_encoder_decoder:
        raise ValueError(
            f"{kind} is not a family of the zoo; of other models only decoders can be estimated"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and job.length > longest:
        raise ValueError(f"length {job.length} is more than the model's {longest} positions")


def _build_model_of_transformers(config: Any, job: Job) -> Any:
    """Returns a causal language model without weights, in the job's precision."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config).to(DTYPES[job.precision]).train()
        except ValueError:
            raise ValueError(
                f"transformers has no causal language model of type {config.model_type!r}"
            ) from None


def _find_blocks(model: nn.Module, layers: int) -> tuple[str, nn.ModuleList]:
    """Returns the `ModuleList` of the model's blocks, and its name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return name, module
    raise ValueError(
        f"{type(model).__name__} has no ModuleList of {layers} blocks, so it cannot be estimated"
    )


def _measure_parameters_of_transformers(model: nn.Module) -> list[ParameterSize]:
    """Returns the sizes of the parameters, which no rank splits."""
    tables: set[nn.Parameter] = set()
    for module in model.modules():
        if is_embedding(module):
            tables.update(module.parameters())
    sizes: list[ParameterSize] = []
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        sizes.append(ParameterSize(name, shape, shape, parameter in tables))
    return sizes


def _measure_saved_tensors(model: Any, job: Job) -> tuple[int, int]:
    """Returns the bytes of all storages that a forward pass keeps for backward, and of the largest
    one.

    Storages of the model's parameters and buffers do not count.
    """
    storages: dict[int, Any] = {}
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    ids = torch.zeros(job.micro_batch_size, job.length, dtype=torch.long, device="meta")
    mask = torch.ones_like(ids)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False)
    sizes = [storage.nbytes() for storage in storages.values()]
    return sum(sizes), max(sizes)


@dataclass(frozen=True)
class Job:
    """One process's share of a training run. Raises ValueError for a run that the trainer would
    refuse.

    Attributes:
        micro_batch_size: Sequences in one forward pass of a rank.
        length: Tokens in a sequence; in an encoder-decoder's source.
        target_length: Tokens in an encoder-decoder's target; by default as many as in the source.
        expert_parallel_size: Ranks that the experts are dealt over; each has a micro-batch of its
            own. With all experts equally popular, a rank computes as many rows as without it.
        padded: Whether there is an attention mask.
        accumulation_steps: Micro-batches for one optimizer step.
        zero_stage: DeepSpeed's ZeRO stage. None means no DeepSpeed. Under tensor or pipeline
            parallelism it means stage 1, or 0 for Adafactor and LAMB in fp32.
        fsdp: Whether torch's FSDP2 splits parameters, gradients and optimizer state over the
            data-parallel ranks.
        pipeline_blocks: Blocks of each pipeline stage; by default, equal numbers.
        optimizer_in_backward: Whether each parameter is updated as soon as it has its gradient.
        precision: Precision of parameters, activations and gradients. The optimizer keeps fp32
            copies of 16-bit parameters.
        lora_rank, lora_target_modules, lora_target_parameters: Those of LoRA weights, which alone
            are trained; 0 for none.
        base_precision: How the linear layers under LoRA weights are packed, if they are.
        teacher: The configuration of a teacher, of the same precision; None without one.
        teacher_parallel_size: Its tensor-parallel ranks; None for the student's.
    """

    micro_batch_size: int = 1
    length: int = 512
    target_length: int | None = None
    padded: bool = True
    accumulation_steps: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    context_exchange: ContextExchange = "auto"
    pipeline_blocks: tuple[int, ...] | None = None
    zero_stage: Literal[0, 1, 2, 3] | None = None
    fsdp: bool = False
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    precision: PrecisionName = "bf16"
    optimizer: OptimizerName = "adamw"
    optimizer_in_backward: bool = False
    frozen: tuple[Literal["embeddings", "encoder", "decoder"], ...] = ()
    lora_rank: int = 0
    lora_target_modules: str | tuple[str, ...] | None = None
    lora_target_parameters: tuple[str, ...] = ()
    base_precision: PackedFormat | None = None
    teacher: ModelConfig | None = None
    teacher_parallel_size: int | None = None
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        for name in (
            "micro_batch_size",
            "length",
            "accumulation_steps",
            "tensor_parallel_size",
            "data_parallel_size",
            "pipeline_parallel_size",
            "context_parallel_size",
            "expert_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for length in (self.length, self.target_length or 0):
            if length % self.context_parallel_size:
                raise ValueError(
                    f"a sequence of {length} tokens cannot be split over "
                    f"{self.context_parallel_size} context-parallel ranks"
                )
        if self.expert_parallel_size > 1 and self.stage == 3:
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} does not work with ZeRO stage 3; "
                "use zero_stage 0 to 2, or fsdp, or expert_parallel_size=1"
            )
        is_elementwise = find_optimizer(self.optimizer).is_elementwise
        if self.expert_parallel_size > 1 and (
            PRECISIONS[self.precision].scales_loss or not is_elementwise
        ):
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} does not work with precision="
                f"{self.precision!r} and optimizer={self.optimizer!r}; use fp32 or bf16 with "
                f"{', '.join(ELEMENTWISE_NAMES)}, or expert_parallel_size=1"
            )
        if self.lora_rank < 0 or (self.lora_rank and self.pipeline_parallel_size > 1):
            raise ValueError(
                f"lora_rank={self.lora_rank} must be 0 or more, and is estimated for one pipeline "
                "stage only"
            )
        if self.base_precision is not None and (not self.lora_rank or self.fsdp or self.stage == 3):
            raise ValueError(
                f"base_precision={self.base_precision!r} needs lora_rank, and works with neither "
                "fsdp nor ZeRO stage 3"
            )
        if self.teacher is not None:
            is_split = self.pipeline_parallel_size > 1 or self.fsdp or self.stage == 3
            is_moved = self.teacher_parallel_size not in (None, self.tensor_parallel_size)
            if is_split or (is_moved and self.context_parallel_size > 1):
                raise ValueError(
                    "a teacher works with neither pipeline stages, fsdp nor ZeRO stage 3, and in "
                    "another layout not with context parallelism"
                )
        if self.fsdp and (self.pipeline_parallel_size > 1 or self.zero_stage is not None):
            raise ValueError("fsdp does not work with pipeline stages or a ZeRO stage")
        if self.pipeline_parallel_size > 1 and (self.stage or 0) > 1:
            raise ValueError(
                f"ZeRO stage {self.stage} does not work with pipeline parallelism; use 0 or 1"
            )
        if self.stage == 3 and self.tensor_parallel_size > 1:
            raise ValueError(
                "ZeRO stage 3 splits parameters that tensor parallelism has already split; use "
                "0, 1 or 2"
            )
        if not find_optimizer(self.optimizer).is_elementwise and self.stage == 3:
            raise ValueError(
                f"{self.optimizer} needs statistics of whole parameters, which ZeRO stage 3 "
                f"splits; use 0, 1 or 2, or {' or '.join(ELEMENTWISE_NAMES)}"
            )
        ranks = self.tensor_parallel_size * self.context_parallel_size
        is_split = self.fsdp or self.stage is not None or ranks > 1
        if find_optimizer(self.optimizer).count_state_bytes is not None and is_split:
            raise ValueError(
                f"{self.optimizer} has states in blocks of whole parameters, so it works without "
                "DeepSpeed, FSDP, tensor and context parallelism only"
            )
        if self.optimizer_in_backward and (
            self.accumulation_steps > 1
            or not find_optimizer(self.optimizer).lone_step_classes
            or (not self.fsdp and (self.stage is not None or self.replicas > 1))
        ):
            raise ValueError(
                "optimizer_in_backward works for one micro-batch a step, in one process or with fsdp, "
                f"with {' or '.join(LONE_STEP_NAMES)}"
            )
        if self.stage == 0 and self.itemsize == 2:
            raise ValueError(
                f"{self.precision} under DeepSpeed needs the ZeRO optimizer, which keeps the fp32 "
                "master weights, and zero_stage=0 has none; use 1, 2 or 3"
            )

    @property
    def stage(self) -> int | None:
        """The ZeRO stage, or None without DeepSpeed."""
        if self.fsdp:
            return None
        split = self.tensor_parallel_size * self.pipeline_parallel_size > 1
        if self.zero_stage is None and split:
            is_elementwise = find_optimizer(self.optimizer).is_elementwise
            return int(is_elementwise or self.precision != "fp32")
        return self.zero_stage

    @property
    def expert_replicas(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same parameters, experts that are dealt over ranks
        excepted. ZeRO divides the optimizer's state among them.
        """
        return self.expert_replicas * self.expert_parallel_size

    def share(self, sizes: Iterable[ParameterSize]) -> int:
        """Returns the elements of a rank's share of parameters that the replicas divide."""
        experts = 0
        others = 0
        for size in sizes:
            if size.is_expert:
                experts += size.local
            else:
                others += size.local
        return -(-others // self.replicas) + -(-experts // self.expert_replicas)

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter, an activation and a gradient."""
        return PRECISIONS[self.precision].itemsize

    @property
    def layout(self) -> Layout:
        parallel_config = ParallelConfig(self.sequence_parallel, self.recompute)
        return Layout(self.itemsize, self.tensor_parallel_size, parallel_config, self.device)

    def batch(self, *, has_target: bool) -> Batch:
        """Returns the sizes of a rank's part of a micro-batch. A target is by default as long as the
        source.
        """
        target = (self.target_length or self.length) if has_target else 0
        parts = self.context_parallel_size
        return Batch(self.micro_batch_size, self.length // parts, target // parts, self.padded)

    def gathers_keys(self, heads: int) -> bool:
        """Returns whether context-parallel ranks gather the keys and values of a layer, and keep
        them for the backward pass.
        """
        ranks = self.context_parallel_size
        if ranks == 1 or self.recompute != "none" or self.context_exchange == "ring":
            return False
        return self.context_exchange == "keys" or bool(heads % (self.tensor_parallel_size * ranks))
