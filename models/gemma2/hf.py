"""Maps each native parameter of Gemma 2 and 3 to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..llama.hf import name_map

NAME_MAP = name_map(
    {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
)
