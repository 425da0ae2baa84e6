"""Maps each native parameter of XLM-RoBERTa-XL to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..bert.hf import with_norms_before
from ..roberta.hf import NAME_MAP as ROBERTA

_BLOCK = "encoder.blocks.{i}"
_LAYER = "roberta.encoder.layer.{i}"

NAME_MAP = with_norms_before(
    ROBERTA,
    {
        f"{_BLOCK}.attention_norm": f"{_LAYER}.attention.self_attn_layer_norm",
        f"{_BLOCK}.cross_attention_norm": f"{_LAYER}.crossattention.self_attn_layer_norm",
        f"{_BLOCK}.mlp_norm": f"{_LAYER}.LayerNorm",
        "encoder.final_norm": "roberta.encoder.LayerNorm",
    },
)
