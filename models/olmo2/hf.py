"""Maps each native parameter of OLMo 2 to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..llama.hf import keep_norms_of_all_heads, name_map

NAME_MAP = keep_norms_of_all_heads(
    name_map(
        {
            "attention_output_norm": "post_attention_layernorm",
            "mlp_output_norm": "post_feedforward_layernorm",
        }
    )
)
