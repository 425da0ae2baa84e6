"""Maps each native parameter of Megatron-BERT to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from dataclasses import replace

from ..bert.hf import NAME_MAP as BERT
from ..bert.hf import both
from ..name_map import NameEntry

_BLOCK = "encoder.blocks.{i}"
_LAYER = "bert.encoder.layer.{i}"
# The norms, whose places differ from BERT's.
_NORMS = {
    f"{_BLOCK}.attention_norm": f"{_LAYER}.attention.ln",
    f"{_BLOCK}.cross_attention_norm": f"{_LAYER}.crossattention.ln",
    f"{_BLOCK}.mlp_norm": f"{_LAYER}.ln",
    "encoder.final_norm": "bert.encoder.ln",
}


def _list_entries() -> tuple[NameEntry, ...]:
    entries: list[NameEntry] = []
    for entry in BERT.entries:
        module = entry.native.rpartition(".")[0]
        if module not in _NORMS and module != "encoder.embedding_norm":
            entries.append(entry)
    for native, stored in _NORMS.items():
        entries += both(native, stored)
    return tuple(entries)


NAME_MAP = replace(BERT, entries=_list_entries())
