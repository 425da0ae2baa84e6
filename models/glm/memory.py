"""Describes GLM's blocks for the memory estimate."""

from __future__ import annotations

from ..activations import Activations, BlockSpec, StackSpec, count_mlp_tensors
from .config import GLMConfig


def activations(config: GLMConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    block = BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_size=config.hidden_size // config.num_attention_heads,
        feed_forward=4 * config.hidden_size,
        mlp_kept=count_mlp_tensors(config.hidden_act, drops=False),
        attention_dropout=config.attention_dropout_prob > 0,
        dropouts=2 if config.output_dropout_prob else 0,
        statistics=2,
        causal=True,
    )
    return Activations((StackSpec("blocks.", config.num_layers, block),))
