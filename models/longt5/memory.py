"""Describes LongT5's blocks for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..t5.memory import activations as t5_activations
from .config import LongT5Config


def activations(config: LongT5Config) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    found = t5_activations(config)
    encoder = found.stacks[0]
    block = replace(
        encoder.block,
        block_length=config.block_length,
        summed=config.global_block_size if config.sums_blocks else 0,
    )
    return replace(found, stacks=(replace(encoder, block=block), *found.stacks[1:]))
