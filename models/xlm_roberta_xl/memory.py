"""Describes XLM-RoBERTa-XL's blocks for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..bert.memory import activations as bert_activations
from .config import XLMRobertaXLConfig


def activations(config: XLMRobertaXLConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass.

    The output of the MLP has no dropout.
    """
    found = bert_activations(config)
    stacks = tuple(
        replace(stack, block=replace(stack.block, dropouts=min(stack.block.dropouts, 1)))
        for stack in found.stacks
    )
    return replace(found, stacks=stacks)
