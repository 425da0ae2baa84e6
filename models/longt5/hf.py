"""Maps each native parameter of LongT5 to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from dataclasses import replace

from ..name_map import NameEntry, NameMap
from ..t5.hf import NAME_MAP as T5_NAME_MAP
from .config import LongT5Config

_ATTENTION = "encoder.block.{i}.layer.0.TransientGlobalSelfAttention"


def _rename(entry: NameEntry, attention: str) -> NameEntry:
    """Returns an entry of T5 with another stored name of the encoder's attention."""
    if not entry.native.startswith("encoder."):
        return entry
    names = [name.replace("SelfAttention", attention) for name in entry.stored_names()]
    return replace(entry, stored=tuple(names) if len(names) > 1 else names[0])


def _name_map(attention: str) -> NameMap:
    entries = (
        *(_rename(entry, attention) for entry in T5_NAME_MAP.entries),
        NameEntry(
            "encoder.global_relative_bias.weight",
            f"{_ATTENTION.replace('{i}', '0')}.global_relative_attention_bias.weight",
        ),
        NameEntry(
            "encoder.blocks.{i}.attention.global_norm.weight",
            f"{_ATTENTION}.global_input_layer_norm.weight",
        ),
    )
    return replace(T5_NAME_MAP, entries=entries)


NAME_MAP = _name_map("LocalSelfAttention")
_TRANSIENT_GLOBAL = _name_map("TransientGlobalSelfAttention")


def name_map(config: LongT5Config) -> NameMap:
    """Returns the names of a model: its encoder's attention is called by its kind."""
    return _TRANSIENT_GLOBAL if config.sums_blocks else NAME_MAP
