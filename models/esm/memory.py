"""Describes ESM's blocks for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..bert.memory import activations as bert_activations
from .config import EsmConfig


def activations(config: EsmConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    found = bert_activations(config)
    stacks = tuple(
        replace(stack, block=replace(stack.block, rotary=config.is_rotary))
        for stack in found.stacks
    )
    return replace(found, stacks=stacks)
