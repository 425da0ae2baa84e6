"""Tells how GGUF files spell GLM-4 of 2025."""

from __future__ import annotations

from typing import Any

from ...checkpoint.formats.gguf_file import GgufContents
from ..llama.gguf import HEAD_SIZE, gguf


def find_rotated_part(contents: GgufContents) -> dict[str, Any]:
    """Returns the part of a head that is rotated, a half unless the header says otherwise."""
    heads = contents.number("attention.head_count", 1)
    size = contents.number("attention.key_length", contents.number("embedding_length") // heads)
    rotated = contents.number("rope.dimension_count", size // 2)
    return {"head_dim": size, "partial_rotary_factor": rotated / size}


GGUF = gguf(
    "glm4",
    "Glm4ForCausalLM",
    keys=HEAD_SIZE,
    block={
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    flags={"attention_bias": "model.layers.0.self_attn.q_proj.bias"},
    find_keys=find_rotated_part,
)
