"""Runs stacks of blocks: the one loop over blocks, which the models of all families use.

A model's forward pass has three parts: the embeddings (a method `embed`), the blocks with the context of the call
(masks, rotary positions, caches), and the end (final norm, head, loss). Only hidden states pass from part to part; the
context follows from the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...mpu import checkpoint

Context = Callable[[int], tuple[Any, ...]]
"""Returns the arguments of block i after its input."""


class Hidden(NamedTuple):
    """What the embeddings and blocks of a model compute for its head.

    Attributes:
        states: The embedding output and each block's output, the last one after the final norm if there is one,
            [B, S, H], or [B, S/tp, H] under sequence parallelism.
        table: The word embedding table for a tied head; see `VocabParallelHead.forward`.
    """

    states: list[Tensor]
    table: Tensor | None


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, context: Context, recompute: bool) -> list[Tensor]:
    """Returns the blocks' input and each block's output.

    Args:
        blocks: Each maps (its input, *context(its number)) to its output.
        x: [B, S, H], or [B, S/tp, H] under sequence parallelism.
        recompute: Keep only each block's input for the backward pass, and compute the block again there.
    """
    states = [x]
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, *context(i)) if recompute else block(x, *context(i))
        states.append(x)
    return states
