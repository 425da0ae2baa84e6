"""Maps each native parameter of OLMoE to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from dataclasses import replace

from ..llama.hf import name_map
from ..mixtral.hf import NORMS, list_expert_entries
from ..name_map import NameMap

_NAMES = name_map(NORMS, experts=list_expert_entries("mlp", "gate_proj", "up_proj", "down_proj"))

# Its norms of queries and keys are those of all heads.
NAME_MAP: NameMap = replace(
    _NAMES,
    entries=tuple(
        entry
        for entry in _NAMES.entries
        if not entry.native.endswith(("attention.q_norm.weight", "attention.k_norm.weight"))
    ),
)
