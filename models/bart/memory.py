"""Describes BART's blocks for the memory estimate. mBART's and M2M100's blocks are the same, except
for the norms.
"""

from __future__ import annotations

from ..activations import Activations, BlockSpec, StackSpec, count_mlp_tensors
from .config import BartConfig


def activations(config: BartConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""

    def block(heads: int, feed_forward: int, is_decoder: bool, crosses: bool = False) -> BlockSpec:
        drops = config.activation_dropout > 0
        return BlockSpec(
            hidden=config.d_model,
            heads=heads,
            head_size=config.d_model // heads,
            feed_forward=feed_forward,
            mlp_kept=count_mlp_tensors(config.activation_function, drops),
            attention_dropout=config.attention_dropout > 0,
            dropouts=(2 + crosses if config.dropout else 0) + drops,
            statistics=2,
            causal=is_decoder,
            cross=crosses,
        )

    has_encoder = not config.architecture.endswith("ForCausalLM")
    encoder = block(config.encoder_attention_heads, config.encoder_ffn_dim, False)
    decoder = block(config.decoder_attention_heads, config.decoder_ffn_dim, True, has_encoder)
    stacks: list[StackSpec] = []
    if has_encoder:
        stacks.append(StackSpec("encoder.blocks.", config.encoder_layers, encoder))
    if not config.architecture.endswith("Encoder"):
        stacks.append(
            StackSpec("decoder.blocks.", config.decoder_layers, decoder, is_decoder=has_encoder)
        )
    return Activations(
        tuple(stacks),
        # Of the final norm, input and output; without it, of the embedding norm. mBART has both,
        # whose tensors are three, because the embedding norm's output is the first block's input.
        ends=2 + (config.pre_norm and config.embedding_norm),
    )
