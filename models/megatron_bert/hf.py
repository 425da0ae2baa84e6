"""Maps each native parameter of Megatron-BERT to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..bert.hf import NAME_MAP as BERT
from ..bert.hf import with_norms_before

_BLOCK = "encoder.blocks.{i}"
_LAYER = "bert.encoder.layer.{i}"

NAME_MAP = with_norms_before(
    BERT,
    {
        f"{_BLOCK}.attention_norm": f"{_LAYER}.attention.ln",
        f"{_BLOCK}.cross_attention_norm": f"{_LAYER}.crossattention.ln",
        f"{_BLOCK}.mlp_norm": f"{_LAYER}.ln",
        "encoder.final_norm": "bert.encoder.ln",
    },
)
