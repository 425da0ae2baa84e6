"""Describes the blocks of Switch Transformers for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..t5.memory import activations as dense_activations
from .config import SwitchTransformersConfig


def activations(config: SwitchTransformersConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass.

    All layers count as mixtures if some are.
    """
    dense = dense_activations(config)
    stacks = tuple(
        replace(stack, block=replace(stack.block, routed=1, experts=config.num_experts))
        for stack in dense.stacks
    )
    return replace(dense, stacks=stacks)
