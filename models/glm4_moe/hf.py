"""Maps each native parameter of GLM-4.5, and of the mixtures like it, to its tensors in Hugging
Face's checkpoints.

A file has three matrices of each expert, which transformers 5 stacks in memory.
"""

from __future__ import annotations

from ..llama.hf import LAYER, MLP, name_map
from ..mixtral.hf import NORMS, list_expert_entries
from ..name_map import NameEntry, NameMap

_SHARED = f"{LAYER}.mlp.shared_experts"

MIXTURE = (
    *list_expert_entries("mlp", "gate_proj", "up_proj", "down_proj"),
    NameEntry(f"{MLP}.correction.value", f"{LAYER}.mlp.gate.e_score_correction_bias"),
    NameEntry(
        f"{MLP}.shared.gate_up.weight", (f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight")
    ),
    NameEntry(f"{MLP}.shared.down.weight", f"{_SHARED}.down_proj.weight"),
)

NAME_MAP: NameMap = name_map(NORMS, experts=MIXTURE)
