"""Tells how GGUF files spell T5 and its kin.

The files do not tell a T5 of version 1.1 from an mT5, whose tensors and sums are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...checkpoint.formats.gguf_file import GgufArchitecture, GgufContents

_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "d_model",
    "feed_forward_length": "d_ff",
    "block_count": "num_layers",
    "decoder_block_count": "num_decoder_layers",
    "attention.head_count": "num_heads",
    "attention.key_length": "d_kv",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    "decoder_start_token_id": "decoder_start_token_id",
}
_ATTENTION = {"q": "q", "k": "k", "v": "v", "o": "o", "rel_b": "relative_attention_bias"}


def is_gated(contents: GgufContents) -> bool:
    return "enc.blk.0.ffn_gate.weight" in contents.tensors


def has_a_table_per_layer(contents: GgufContents) -> bool:
    """Whether each layer of the encoder has a table of relative positions, as UMT5's do."""
    return "enc.blk.1.attn_rel_b.weight" in contents.tensors


def gguf(
    name: str,
    model_type: str,
    class_name: str,
    is_meant: Callable[[GgufContents], bool],
    *,
    gated: bool,
    **facts: Any,
) -> GgufArchitecture:
    """Returns the spelling of an encoder, or of one with a decoder.

    Args:
        name: GGUF's name.
        model_type: The family's name.
        class_name: Its class of transformers.
        is_meant: See `GgufArchitecture`.
        gated: Whether the MLP has a gate.
        facts: Other arguments of `GgufArchitecture`.
    """
    names = {"token_embd": "shared", "output": "lm_head"}
    for stack, parts in (("enc", 2), ("dec", 3)):
        whole = "encoder" if stack == "enc" else "decoder"
        names[f"{stack}.output_norm"] = f"{whole}.final_layer_norm"
        block = {"attn_norm": "layer.0.layer_norm"}
        for stored, own in _ATTENTION.items():
            block[f"attn_{stored}"] = f"layer.0.SelfAttention.{own}"
            if stack == "dec":
                block[f"cross_attn_{stored}"] = f"layer.1.EncDecAttention.{own}"
        if stack == "dec":
            block["cross_attn_norm"] = "layer.1.layer_norm"
        mlp = f"layer.{parts - 1}"
        block["ffn_norm"] = f"{mlp}.layer_norm"
        block["ffn_up"] = f"{mlp}.DenseReluDense.{'wi_1' if gated else 'wi'}"
        block["ffn_gate"] = f"{mlp}.DenseReluDense.wi_0"
        block["ffn_down"] = f"{mlp}.DenseReluDense.wo"
        for stored, own in block.items():
            names[f"{stack}.blk.{stored}"] = f"{whole}.block.{{i}}.{own}"
    constants = {"feed_forward_proj": "gated-gelu" if gated else "relu"}
    return GgufArchitecture(
        name,
        model_type,
        class_name,
        names,
        _KEYS,
        is_rotary=False,
        constants=constants,
        is_meant=is_meant,
        **facts,
    )


def _is_t5_with_gates(contents: GgufContents) -> bool:
    return is_gated(contents) and not has_a_table_per_layer(contents)


def _is_t5_without_gates(contents: GgufContents) -> bool:
    return not is_gated(contents) and not has_a_table_per_layer(contents)


GGUF = [
    gguf(name, "t5", class_name, is_meant, gated=gated)
    for name, class_name in (("t5", "T5ForConditionalGeneration"), ("t5encoder", "T5EncoderModel"))
    for gated, is_meant in ((True, _is_t5_with_gates), (False, _is_t5_without_gates))
]
