"""Describes the blocks of Llama, and of the decoders like it, for the memory estimate."""

from __future__ import annotations

from ..activations import Activations, BlockSpec, StackSpec, count_gated_mlp_tensors
from .config import DecoderConfig


def activations(config: DecoderConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass.

    If some layers have a window, all blocks count as such, because the mask of a window is the
    larger one.
    """
    windows = [window for window in config.windows if window is not None]
    block = BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        key_value_heads=config.key_value_heads,
        head_size=config.head_size,
        feed_forward=config.intermediate_size,
        mlp_kept=count_gated_mlp_tensors(config.hidden_act, fused=True),
        attention_dropout=config.attention_dropout > 0,
        dropouts=0,
        statistics=1,
        causal=True,
        gated=True,
        fused=True,
        rotary=True,
        qk_norm=config.qk_norm,
        all_heads_norm=config.qk_norm and config.norms_all_heads,
        rounds_once=config.norm_offset is not None,
        input_norms=config.input_norms,
        output_norms=config.sandwich_norms,
        capped=config.score_cap is not None,
        window=min(windows) - 1 if windows else None,
    )
    return Activations((StackSpec("blocks.", config.num_hidden_layers, block),))
