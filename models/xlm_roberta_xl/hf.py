"""Maps each native parameter of XLM-RoBERTa-XL to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from dataclasses import replace

from ..bert.hf import both
from ..name_map import NameEntry
from ..roberta.hf import NAME_MAP as ROBERTA

_BLOCK = "encoder.blocks.{i}"
_LAYER = "roberta.encoder.layer.{i}"
# The norms, whose places differ from RoBERTa's.
_NORMS = {
    f"{_BLOCK}.attention_norm": f"{_LAYER}.attention.self_attn_layer_norm",
    f"{_BLOCK}.cross_attention_norm": f"{_LAYER}.crossattention.self_attn_layer_norm",
    f"{_BLOCK}.mlp_norm": f"{_LAYER}.LayerNorm",
    "encoder.final_norm": "roberta.encoder.LayerNorm",
}


def _list_entries() -> tuple[NameEntry, ...]:
    entries: list[NameEntry] = []
    for entry in ROBERTA.entries:
        module = entry.native.rpartition(".")[0]
        if module not in _NORMS and module != "encoder.embedding_norm":
            entries.append(entry)
    for native, stored in _NORMS.items():
        entries += both(native, stored)
    return tuple(entries)


NAME_MAP = replace(ROBERTA, entries=_list_entries())
