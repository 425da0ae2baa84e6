"""Runs the blocks of a model one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from ...mpu import checkpoint

Context = Callable[[int], tuple[Any, ...]]
"""Returns the arguments of block i after its input."""


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
