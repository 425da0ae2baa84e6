"""Runs stacks of blocks: the one loop over blocks, which the models of all families use.

A model's forward pass has three parts: the embeddings (a method `embed`), the blocks with the context of the call
(masks, rotary positions, caches), and the end (final norm, head, loss). Only hidden states pass from part to part; the
context follows from the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ...mpu import ParallelMesh, VocabParallelEmbedding, checkpoint, gather_sequence, scatter_sequence
from .parallel_config import ParallelConfig

Context = Callable[[int], tuple[Any, ...]]
"""Returns the arguments of block i after its input."""


class Hidden(NamedTuple):
    """What the embeddings and blocks of a model compute for its head.

    Attributes:
        states: The embedding output and each block's output, the last one after the final norm if there is one,
            [B, S, H], or [B, S/tp, H] under sequence parallelism.
        table: The word embedding table for a tied head; see `VocabParallelHead.forward`.
        encoder_states: The same of the encoder, if `states` are those of a decoder that attends to it.
    """

    states: list[Tensor]
    table: Tensor | None
    encoder_states: list[Tensor] | None = None


class Body(nn.Module):
    """Base of the models: embeddings and blocks, without a head.

    A subclass sets the attributes.
    """

    config: Any  # the family's ModelConfig
    mesh: ParallelMesh | None
    parallel_config: ParallelConfig
    word_embeddings: VocabParallelEmbedding

    def body(self, *inputs: Any, **options: Any) -> Hidden:
        """Runs the embeddings and blocks. The first two arguments are `input_ids` and `attention_mask`."""
        raise NotImplementedError

    @property
    def hidden_size(self) -> int:
        """The width H of the hidden states."""
        return getattr(self.config, self.config.attribute_map.get("hidden_size", "hidden_size"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters, on every stage of a pipeline."""
        return next(self.parameters()).dtype

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The word embedding, to which a head may be tied."""
        return self.word_embeddings

    @classmethod
    def example_ids(cls, config: Any, ids: Tensor) -> Tensor:
        """Returns arbitrary token ids int64 [B, S] in the form that the head takes, to try it."""
        return ids

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits of all classes, for logits that are replicated: the same."""
        return logits

    def gather_hidden_states(self, x: Tensor) -> Tensor:
        """Returns the whole hidden states [B, S, H], of which each rank may hold a part [B, S/tp, H]."""
        return gather_sequence(x, self.mesh, partial_grad=False) if self.parallel_config.sequence_parallel else x

    def gather_all_hidden_states(self, hidden_states: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.gather_hidden_states(x) for x in hidden_states)

    def scatter_hidden_states(self, x: Tensor) -> Tensor:
        """Returns this rank's part of whole hidden states [B, S, H]."""
        return scatter_sequence(x, self.mesh) if self.parallel_config.sequence_parallel else x

    def shown_states(self, hidden: Hidden, output_hidden_states: bool) -> dict[str, Any]:
        """Returns the fields of an output that hold hidden states."""

        def gathered(states: list[Tensor]) -> tuple[Tensor, ...] | None:
            return self.gather_all_hidden_states(states) if output_hidden_states else None

        if hidden.encoder_states is None:
            return {"hidden_states": gathered(hidden.states)}
        return {
            "decoder_hidden_states": gathered(hidden.states),
            "encoder_last_hidden_state": self.gather_hidden_states(hidden.encoder_states[-1]),
            "encoder_hidden_states": gathered(hidden.encoder_states),
        }


def run_blocks(blocks: nn.ModuleList, x: Tensor, context: Context, recompute: bool) -> list[Tensor]:
    """Returns the blocks' input and each block's output.

    Args:
        blocks: Of a pipeline stage, only its own run; each maps (its input, *context(its number)) to its output.
        x: [B, S, H], or [B, S/tp, H] under sequence parallelism.
        recompute: Keep only each block's input for the backward pass, and compute the block again there.

    Raises:
        StageEnd: The next block is in the next pipeline stage.
    """
    part: PipelinePart | None = getattr(blocks, "part", None)
    numbers = range(len(blocks))
    if part is not None:
        numbers, x = part.own, part.enter(x)
    states = [x]
    for i in numbers:
        x = checkpoint(blocks[i], x, *context(i)) if recompute else blocks[i](x, *context(i))
        states.append(x)
    if part is not None and numbers.stop < len(blocks):
        raise StageEnd(x)
    return states


class StageEnd(Exception):
    """Leaves the forward pass of a model whose next block is in the next pipeline stage."""

    def __init__(self, hidden: Tensor | None) -> None:
        super().__init__("the next block is in the next pipeline stage")
        self.hidden = hidden


class PipelinePart(Protocol):
    """The blocks of a stack that are in this pipeline stage; `part` of the list of blocks."""

    own: range

    def enter(self, x: Any) -> Tensor:
        """Returns the input of the first own block: `x` if that is the stack's first, else what was received."""
        ...
