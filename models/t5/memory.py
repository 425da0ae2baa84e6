"""Describes T5's blocks for the memory estimate. Those of mT5 and UMT5 are the same."""

from __future__ import annotations

from typing import Any

from ..activations import (
    Activations,
    BlockSpec,
    StackSpec,
    count_gated_mlp_tensors,
    count_mlp_tensors,
)
from .config import T5Config


def activations(config: T5Config) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    drops = config.dropout_rate > 0
    if config.is_gated:
        mlp_kept = count_gated_mlp_tensors(config.activation, fused=False)
    else:
        mlp_kept = count_mlp_tensors(config.activation, drops)
    block: dict[str, Any] = {
        "hidden": config.d_model,
        "heads": config.num_heads,
        "head_size": config.d_kv,
        "feed_forward": config.d_ff,
        "mlp_kept": mlp_kept,
        "gated": config.is_gated,
        "attention_dropout": drops,
        "bias": True,
        "own_bias": not config.shares_relative_bias,
        "statistics": 1,
    }
    encoder = BlockSpec(**block, dropouts=3 if drops else 0)
    decoder = BlockSpec(**block, dropouts=4 if drops else 0, causal=True, cross=True)
    stacks = [StackSpec("encoder.blocks.", config.num_layers, encoder)]
    if config.decoder_layers:
        stacks.append(StackSpec("decoder.blocks.", config.decoder_layers, decoder, is_decoder=True))
    return Activations(tuple(stacks))
