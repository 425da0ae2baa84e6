"""Describes EuroBERT's blocks for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..llama.memory import activations as llama_activations
from .config import EuroBertConfig


def activations(config: EuroBertConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    found = llama_activations(config)
    stacks = tuple(
        replace(stack, block=replace(stack.block, causal=False)) for stack in found.stacks
    )
    return replace(found, stacks=stacks)
