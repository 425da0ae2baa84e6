"""A model as the estimate sees it: parameters, and what its parts keep, whether the family is the zoo's or not."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.activations import BlockBytes, block_bytes, end_bytes, logit_bytes, stacks
from ...models.common.config import ModelConfig
from ...models.sizes import ParameterSize, parameter_sizes
from .job import Job


@dataclass(frozen=True)
class Part:
    """Equal blocks of a model. parameters: of all of them."""

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
    parts: tuple[Part, ...]
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
    split = stacks(config)
    has_target = any(stack.is_decoder for stack in split)
    batch, layout = job.batch(has_target=has_target), job.layout
    if not has_target and job.length > config.max_sequence_length:
        raise ValueError(f"length {job.length} is more than the model's {config.max_sequence_length} positions")
    trained = [size for size in sizes if not is_frozen(size, job)]
    parts = []
    for stack in split:
        own = tuple(size for size in trained if size.name.startswith(stack.path))
        parts.append(Part(stack.layers, block_bytes(stack, batch, layout), own))
    table = next(size for size in sizes if size.name.endswith("word_embeddings.weight"))
    head = next((size for size in sizes if size.name.endswith("head.weight")), table)
    logits = logit_bytes(config, head.local_shape[0], batch, layout)
    stream = batch.size * max(batch.length, batch.target_length) * head.local_shape[1] * job.itemsize
    return ModelMemory(
        parameters=tuple(sizes),
        trained=tuple(trained),
        parts=tuple(parts),
        logits=logits,
        loss=0,  # the gradient is written over the logits
        ends=end_bytes(config, batch, layout),
        head=head if head in trained else None,
        table=table if table in trained else None,
        stream=stream,
    )


def is_frozen(size: ParameterSize, job: Job) -> bool:
    """Whether the job leaves a parameter as it is."""
    parts = {"encoder": "encoder.", "decoder": "decoder."}
    if any(part in job.frozen and size.name.startswith(prefix) for part, prefix in parts.items()):
        return True
    return "embeddings" in job.frozen and size.is_embedding
