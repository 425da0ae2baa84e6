"""Describes DeBERTa-v2's blocks for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..bert.memory import activations as bert_activations
from .config import DebertaV2Config


def activations(config: DebertaV2Config) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    found = bert_activations(config)
    if not config.relative_attention:
        return found
    terms = len(config.position_terms)
    positions = 2 * config.position_span
    stacks = tuple(
        replace(
            stack,
            block=replace(stack.block, bias=terms > 0, position_terms=terms, positions=positions),
        )
        for stack in found.stacks
    )
    return replace(found, stacks=stacks)
