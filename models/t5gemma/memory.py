"""Describes T5Gemma's blocks for the memory estimate."""

from __future__ import annotations

from typing import Any

from ..activations import Activations, BlockSpec, StackSpec, count_gated_mlp_tensors
from ..gemma2.config import Gemma2Config
from .config import T5GemmaConfig


def activations(config: T5GemmaConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    drops = 1 if config.dropout_rate > 0 else 0
    encoder = describe_block(config.encoder_config, dropouts=3 * drops)
    stacks = [StackSpec("encoder.blocks.", config.encoder_config.num_hidden_layers, encoder)]
    if not config.has_encoder_alone:
        decoder = describe_block(config.decoder_config, dropouts=4 * drops, causal=True, cross=True)
        layers = config.decoder_config.num_hidden_layers
        stacks.append(StackSpec("decoder.blocks.", layers, decoder, is_decoder=True))
    return Activations(tuple(stacks))


def describe_block(config: Gemma2Config, **parts: Any) -> BlockSpec:
    """Returns the block of a stack, whose other parts are given."""
    windows = [window for window in config.windows if window is not None]
    return BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        key_value_heads=config.key_value_heads,
        head_size=config.head_size,
        feed_forward=config.intermediate_size,
        mlp_kept=count_gated_mlp_tensors(config.hidden_act, fused=True),
        attention_dropout=config.attention_dropout > 0,
        statistics=1,
        gated=True,
        fused=True,
        rotary=True,
        qk_norm=config.qk_norm,
        rounds_once=True,
        output_norms=True,
        capped=config.score_cap is not None,
        window=min(windows) - 1 if windows else None,
        **parts,
    )
