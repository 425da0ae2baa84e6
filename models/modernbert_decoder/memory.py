"""Describes the blocks of ModernBERT's decoder for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..modernbert.memory import activations as encoder_activations
from .config import ModernBertDecoderConfig


def activations(config: ModernBertDecoderConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    found = encoder_activations(config)
    stacks = tuple(
        replace(stack, block=replace(stack.block, causal=True, window=config.window - 1))
        for stack in found.stacks
    )
    return replace(found, stacks=stacks)
