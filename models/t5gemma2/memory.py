"""Describes T5Gemma 2's blocks for the memory estimate."""

from __future__ import annotations

from ..activations import Activations, StackSpec
from ..t5gemma.memory import describe_block
from .config import T5Gemma2Config


def activations(config: T5Gemma2Config) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    dropouts = 3 if config.dropout_rate > 0 else 0
    encoder = describe_block(config.encoder_config, dropouts=dropouts)
    decoder = describe_block(config.decoder_config, dropouts=dropouts, causal=True, merged=True)
    return Activations(
        (
            StackSpec("encoder.blocks.", config.encoder_config.num_hidden_layers, encoder),
            StackSpec(
                "decoder.blocks.", config.decoder_config.num_hidden_layers, decoder, is_decoder=True
            ),
        )
    )
