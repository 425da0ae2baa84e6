"""Describes GPT-2's blocks for the memory estimate."""

from __future__ import annotations

from ..activations import Activations, BlockSpec, StackSpec, count_mlp_tensors
from .config import GPT2Config


def activations(config: GPT2Config) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    block = BlockSpec(
        hidden=config.n_embd,
        heads=config.n_head,
        head_size=config.n_embd // config.n_head,
        feed_forward=config.inner_size,
        mlp_kept=count_mlp_tensors(config.activation_function, drops=False),
        attention_dropout=config.attn_pdrop > 0,
        dropouts=2 if config.resid_pdrop else 0,
        statistics=2,
        causal=True,
    )
    return Activations((StackSpec("blocks.", config.n_layer, block),))
