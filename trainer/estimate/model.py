"""The memory of a model: its parameters and activations, for a family of the zoo and for other transformers models.

A model of the zoo has its own table of what a block keeps for backward. Any other is measured without weights, on the
meta device: what autograd keeps is counted with saved-tensor hooks, once for the whole model and once without its
blocks. Its attention is transformers' "eager" one, all of whose matmuls are visible; a fused one keeps less.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...models.activations import FP32, Batch, BlockBytes, Layout, block_bytes, end_bytes, logit_bytes
from ...models.common.config import ModelConfig
from ...models.common.parallel_config import ParallelConfig
from ...models.registry import family
from ...models.sizes import ParameterSize, is_embedding, parameter_sizes
from ..engines.precision import DTYPES


@dataclass(frozen=True)
class BlockStack:
    """Equal blocks of a model. parameters: of all blocks together."""

    layers: int
    block: BlockBytes
    parameters: tuple[ParameterSize, ...]


@dataclass(frozen=True)
class ModelMemory:
    """trained: those of `parameters` that are. parts: in the order of the forward pass. logits: bytes of the logits,
    and of their gradient. loss: what exists beside the logits at the most while the loss goes backward. ends: what
    else is kept outside the blocks. head, table: the trained weights that make the logits and the token embedding.
    stream: bytes of one [B, S, H]. pieces: copies of the table's gradient that are added up at the end."""

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

    @property
    def is_tied(self) -> bool:
        return self.table is not None and self.table is self.head


def model_memory(config: ModelConfig, job: Job) -> ModelMemory:
    """Of one rank of a family of the zoo. ValueError for a length or a split that the model does not allow."""
    sizes = parameter_sizes(config, job.tensor_parallel_size)
    activations = family(config.model_type).activations(config)
    has_target = any(stack.is_decoder for stack in activations.stacks)
    batch, layout = job.batch(has_target=has_target), job.layout
    if not has_target and job.length > config.max_sequence_length:
        raise ValueError(f"length {job.length} is more than the model's {config.max_sequence_length} positions")
    trained = [size for size in sizes if not is_frozen(size, job)]
    parts = []
    for stack in activations.stacks:
        own = tuple(size for size in trained if size.name.startswith(stack.path))
        parts.append(BlockStack(stack.layers, block_bytes(stack, batch, layout), own))
    table = next(size for size in sizes if size.name.endswith("word_embeddings.weight"))
    head = next((size for size in sizes if size.name.endswith("head.weight")), table)
    logits = logit_bytes(head.local_shape[0], batch, layout)
    stream = batch.size * max(batch.length, batch.target_length) * head.local_shape[1] * job.itemsize
    return ModelMemory(
        parameters=tuple(sizes),
        trained=tuple(trained),
        parts=tuple(parts),
        logits=logits,
        loss=0,  # the gradient is written over the logits
        ends=end_bytes(activations, batch, layout),
        head=head if head in trained else None,
        table=table if table in trained else None,
        stream=stream,
    )


def is_frozen(size: ParameterSize, job: Job) -> bool:
    """Whether the job does not train a parameter."""
    parts = {"encoder": "encoder.", "decoder": "decoder."}
    if any(part in job.frozen and size.name.startswith(prefix) for part, prefix in parts.items()):
        return True
    return "embeddings" in job.frozen and size.is_embedding


def hf_model_memory(config: Any, job: Job) -> ModelMemory:
    """Of a causal language model from transformers' configuration.

    ValueError for what a model of transformers cannot do here: tensor and sequence parallelism, selective
    recomputation; and for models that are no decoders.
    """
    _check(config, job)
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    model = _build(config, job)
    name, blocks = _blocks(model, config.num_hidden_layers)
    sizes = _sizes(model)
    trained = tuple(size for size in sizes if not is_frozen(size, job))
    whole, largest = _kept(model, job)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.ModuleList())
    ends, _ = _kept(model, job)

    kept = (whole - ends) // len(blocks)
    tokens = job.micro_batch_size * job.length
    stream = tokens * config.hidden_size * job.itemsize
    full = job.recompute == "full"
    working = 2 * stream + 2 * largest
    block = BlockBytes(stream, kept - stream + working) if full else BlockBytes(kept, working)
    in_blocks = tuple(size for size in trained if size.name.startswith(f"{name}."))
    names = {parameter: name for name, parameter in model.named_parameters()}
    head, table = (
        next((size for size in trained if size.name == names[module.weight]), None)
        for module in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    # The loss is computed from a copy of the logits in fp32; its log-softmax is kept, and has a gradient.
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


def _check(config: Any, job: Job) -> None:
    kind = config.model_type
    if job.tensor_parallel_size > 1 or job.sequence_parallel:
        raise ValueError(
            f"{kind} is no family of the zoo, so that its layers cannot be split: use one tensor-parallel rank, and no "
            "sequence parallelism"
        )
    if job.recompute == "selective":
        raise ValueError(f"{kind} is no family of the zoo: its activations can be recomputed in full or not at all")
    if config.is_encoder_decoder:
        raise ValueError(f"{kind} is no family of the zoo, and among the others only decoders can be estimated")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and job.length > longest:
        raise ValueError(f"length {job.length} is more than the model's {longest} positions")


def _build(config: Any, job: Job) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config).to(DTYPES[job.precision]).train()
        except ValueError:
            raise ValueError(f"transformers has no causal language model of type {config.model_type!r}") from None


def _blocks(model: nn.Module, layers: int) -> tuple[str, nn.ModuleList]:
    """Returns the name of the list of the model's blocks, and the list."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return name, module
    raise ValueError(f"{type(model).__name__} has no list of {layers} blocks, so its blocks cannot be told apart")


def _sizes(model: nn.Module) -> list[ParameterSize]:
    tables = {parameter for module in model.modules() if is_embedding(module) for parameter in module.parameters()}
    return [
        ParameterSize(name, tuple(parameter.shape), tuple(parameter.shape), parameter in tables)
        for name, parameter in model.named_parameters()
    ]


def _kept(model: Any, job: Job) -> tuple[int, int]:
    """Returns the bytes of all storages that a forward pass keeps for backward, and of the largest one.

    Storages of the model itself do not count.
    """
    storages: dict[int, Any] = {}
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    ids = torch.zeros(job.micro_batch_size, job.length, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
    del loss
    sizes = [storage.nbytes() for storage in storages.values()]
    return sum(sizes), max(sizes)


ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
ELEMENTWISE = ("adamw", "lion")  # optimizers that may update any part of a parameter by itself


@dataclass(frozen=True)
class Job:
    """One process's share of a training run. ValueError for what the trainer would refuse.

    micro_batch_size: sequences in one forward pass of a rank. length: their tokens, of an encoder-decoder's source;
        target_length: of its target. padded: whether there is an attention mask.
    accumulation_steps: micro-batches for one optimizer step.
    tensor_parallel_size, data_parallel_size: ranks. zero_stage: DeepSpeed's; None: without DeepSpeed, and 1 under
        tensor parallelism, which needs it.
    precision: of parameters, activations and gradients; the optimizer keeps fp32 copies of 16-bit parameters.
    frozen: parts that are not trained: "embeddings", "encoder", "decoder".
    device: "cuda" or "cpu".
    """

    micro_batch_size: int = 1
    length: int = 512
    target_length: int | None = None
    padded: bool = True
    accumulation_steps: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    zero_stage: Literal[0, 1, 2, 3] | None = None
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    optimizer: Literal["adamw", "adafactor", "lion", "lamb"] = "adamw"
    frozen: tuple[Literal["embeddings", "encoder", "decoder"], ...] = ()
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "length", "accumulation_steps", "tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.stage == 3 and self.tensor_parallel_size > 1:
            raise ValueError("ZeRO stage 3 splits parameters that tensor parallelism has already split; use 0, 1 or 2")
        if self.optimizer not in ELEMENTWISE and (self.tensor_parallel_size > 1 or self.stage):
            raise ValueError(
                f"{self.optimizer} needs whole parameters, which tensor parallelism and ZeRO split; use "
                f"{' or '.join(ELEMENTWISE)}, or one rank for each layer and no ZeRO"
            )
        if self.stage == 0 and self.itemsize == 2:
            raise ValueError(
                f"{self.precision} under DeepSpeed keeps its fp32 master weights in the ZeRO optimizer: zero_stage=0 "
                "has none; use 1, 2 or 3"
            )

    @property
    def stage(self) -> int | None:
        """The ZeRO stage, or None without DeepSpeed."""
        return 1 if self.zero_stage is None and self.tensor_parallel_size > 1 else self.zero_stage

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter, an activation and a gradient."""
        return ITEMSIZE[self.precision]

    @property
    def layout(self) -> Layout:
        parallel_config = ParallelConfig(self.sequence_parallel, self.recompute)
        return Layout(self.itemsize, self.tensor_parallel_size, parallel_config, self.device)

    def batch(self, *, has_target: bool) -> Batch:
        """target_length: by default as long as the source."""
        target = (self.target_length or self.length) if has_target else 0
        return Batch(self.micro_batch_size, self.length, target, self.padded)
