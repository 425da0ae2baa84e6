"""Describes ModernBERT's blocks for the memory estimate."""

from __future__ import annotations

from ..activations import Activations, BlockSpec, StackSpec, count_gated_mlp_tensors
from .config import ModernBertConfig


def activations(config: ModernBertConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass.

    All blocks count as blocks with local attention, whose mask is the larger one. The first block
    lacks a norm.
    """
    block = BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_size=config.head_size,
        feed_forward=config.intermediate_size,
        mlp_kept=count_gated_mlp_tensors(config.hidden_activation, fused=True),
        attention_dropout=config.attention_dropout > 0,
        dropouts=(config.attention_dropout > 0) + (config.mlp_dropout > 0),
        statistics=2,
        gated=True,
        fused=True,
        rotary=True,
        window=config.local_attention // 2,
    )
    return Activations((StackSpec("blocks.", config.num_hidden_layers, block),), ends=5)
