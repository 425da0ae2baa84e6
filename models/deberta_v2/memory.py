"""Describes DeBERTa-v2's blocks for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..bert.memory import activations as bert_activations
from .config import DebertaV2Config


def activations(config: DebertaV2Config) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass.

    The terms of relative positions count as a bias of each block.
    """
    found = bert_activations(config)
    is_relative = config.relative_attention and bool(config.position_terms)
    stacks = tuple(
        replace(stack, block=replace(stack.block, bias=is_relative)) for stack in found.stacks
    )
    return replace(found, stacks=stacks)
