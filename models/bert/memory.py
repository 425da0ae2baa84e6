"""Describes BERT's blocks for the memory estimate. RoBERTa's blocks are the same."""

from __future__ import annotations

from ..activations import Activations, BlockSpec, StackSpec, count_mlp_tensors
from .config import BertConfig


def activations(config: BertConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    block = BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_size=config.hidden_size // config.num_attention_heads,
        feed_forward=config.intermediate_size,
        mlp_kept=count_mlp_tensors(config.hidden_act, drops=False),
        attention_dropout=config.attention_probs_dropout_prob > 0,
        dropouts=2 if config.hidden_dropout_prob else 0,
        statistics=2,
    )
    # Five tensors outside the blocks: the embedding norm; in the head, the last block's output and
    # the outputs of the dense layer, the activation and the norm.
    return Activations((StackSpec("encoder.blocks.", config.num_hidden_layers, block),), ends=5)
