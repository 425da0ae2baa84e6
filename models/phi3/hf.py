"""Maps each native parameter of Phi-3 to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..llama.hf import name_map

NAME_MAP = name_map(
    {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    gate_up=("gate_up_proj",),
    qkv=("qkv_proj",),
)
