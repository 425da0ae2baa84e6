"""Maps each native parameter of Qwen3-MoE to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..llama.hf import name_map
from ..mixtral.hf import NORMS, list_expert_entries
from ..name_map import NameMap

NAME_MAP: NameMap = name_map(
    NORMS, experts=list_expert_entries("mlp", "gate_proj", "up_proj", "down_proj")
)
