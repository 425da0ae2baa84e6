"""Tells how GGUF files spell SmolLM3."""

from __future__ import annotations

from ..llama.gguf import gguf

# Each fourth layer does not rotate; llama.cpp knows it of the architecture.
GGUF = gguf(
    "smollm3",
    "SmolLM3ForCausalLM",
    rotates_neighbors=True,
    constants={"no_rope_layer_interval": 4},
    flags={"attention_bias": "model.layers.0.self_attn.q_proj.bias"},
)
