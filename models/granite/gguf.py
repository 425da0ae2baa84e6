"""Tells how GGUF files spell Granite."""

from __future__ import annotations

from ..llama.gguf import gguf

GGUF = gguf(
    "granite",
    "GraniteForCausalLM",
    keys={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    rotates_neighbors=True,
    flags={"attention_bias": "model.layers.0.self_attn.q_proj.bias"},
)
