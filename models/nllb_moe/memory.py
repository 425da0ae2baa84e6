"""Describes the blocks of NLLB-MoE for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..bart.memory import activations as dense_activations
from .config import NllbMoeConfig


def activations(config: NllbMoeConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass.

    All layers count as mixtures.
    """
    dense = dense_activations(config)
    stacks = tuple(
        replace(
            stack,
            block=replace(
                stack.block,
                feed_forward=2 * stack.block.feed_forward,
                routed=2,
                experts=config.num_experts,
                normalized=True,
            ),
        )
        for stack in dense.stacks
    )
    return replace(dense, stacks=stacks)
