"""Maps each native parameter of Qwen2-MoE to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..llama.hf import LAYER, MLP, name_map
from ..mixtral.hf import NORMS, list_expert_entries
from ..name_map import NameEntry, NameMap

_SHARED = f"{LAYER}.mlp.shared_expert"

NAME_MAP: NameMap = name_map(
    NORMS,
    experts=(
        *list_expert_entries("mlp", "gate_proj", "up_proj", "down_proj"),
        NameEntry(
            f"{MLP}.shared.gate_up.weight",
            (f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"),
        ),
        NameEntry(f"{MLP}.shared.down.weight", f"{_SHARED}.down_proj.weight"),
        NameEntry(f"{MLP}.shared_gate.weight", f"{LAYER}.mlp.shared_expert_gate.weight"),
    ),
)
