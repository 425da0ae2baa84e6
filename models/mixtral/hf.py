"""Maps each native parameter of Mixtral to its tensors in Hugging Face's checkpoints.

A file has three matrices of each expert. transformers 5 stacks them in memory, and calls the
mixture `mlp` there.
"""

from __future__ import annotations

from ..llama.hf import LAYER, MLP, name_map
from ..name_map import NameEntry, NameMap

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def list_expert_entries(
    mixture: str, gate: str, up: str, down: str
) -> tuple[NameEntry, NameEntry, NameEntry]:
    """Returns the entries of a mixture.

    Args:
        mixture: The name of the stored module in a layer.
        gate, up, down: The names of an expert's stored projections.
    """
    stored = f"{LAYER}.{mixture}"
    expert = f"{stored}.experts.{{e}}"
    return (
        NameEntry(f"{MLP}.router.weight", f"{stored}.gate.weight"),
        NameEntry(f"{MLP}.experts.gate_up", (f"{expert}.{gate}.weight", f"{expert}.{up}.weight")),
        NameEntry(f"{MLP}.experts.down", (f"{expert}.{down}.weight",), transpose=True),
    )


NAME_MAP: NameMap = name_map(
    NORMS,
    experts=list_expert_entries("block_sparse_moe", "w1", "w3", "w2"),
    renamed=((r"(.*layers\.\d+)\.mlp\.(.*)", r"\1.block_sparse_moe.\2"),),
)
