"""Maps each native parameter of OLMoE to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..llama.hf import keep_norms_of_all_heads, name_map
from ..mixtral.hf import NORMS, list_expert_entries

NAME_MAP = keep_norms_of_all_heads(
    name_map(NORMS, experts=list_expert_entries("mlp", "gate_proj", "up_proj", "down_proj"))
)
