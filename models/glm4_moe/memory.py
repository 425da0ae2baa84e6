"""Describes the blocks of GLM-4.5, and of the mixtures like it, for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..llama.memory import activations as dense_activations
from .config import CorrectedMixtureConfig


def activations(config: CorrectedMixtureConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass.

    The few layers with a single MLP count as mixtures.
    """
    dense = dense_activations(config)
    [stack] = dense.stacks
    block = replace(
        stack.block,
        feed_forward=config.expert_size * config.num_experts_per_tok + config.shared_size,
        routed=config.num_experts_per_tok,
        experts=config.expert_count,
        normalized=config.norm_topk_prob,
        corrected=True,
    )
    return replace(dense, stacks=(replace(stack, block=block),))
