"""Describes T5's blocks for the memory estimate. Those of mT5 and UMT5 are the same."""

from __future__ import annotations

from typing import Any

from ..activations import FUSED_GATES, Activations, BlockSpec, StackSpec
from .config import T5Config


def activations(config: T5Config) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    drops = config.dropout_rate > 0
    block: dict[str, Any] = {
        "hidden": config.d_model,
        "heads": config.num_heads,
        "head_size": config.d_kv,
        "feed_forward": config.d_ff,
        "mlp_kept": _count_kept(config, drops),
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


def _count_kept(config: T5Config, drops: bool) -> int:
    """Returns the number of tensors as wide as the MLP that it keeps."""
    is_relu = config.activation == "relu"
    if not config.is_gated:
        kept = 1 if is_relu else 2
        return kept + (drops and is_relu)
    # The outputs of gate and up and the input of down. Without a fused gate, the activation's
    # output is kept too.
    if config.activation in FUSED_GATES:
        return 3
    return 4 + (not is_relu) - (not drops)
