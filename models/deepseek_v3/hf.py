"""Maps each native parameter of DeepSeek-V3 to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from dataclasses import replace

from ..glm4_moe.hf import MIXTURE
from ..llama.hf import ATTENTION, LAYER, name_map
from ..mixtral.hf import NORMS
from ..name_map import NameEntry, NameMap

_STORED = {
    "query": "q_proj",
    "query_a": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "query_b": "q_b_proj",
    "latent": "kv_a_proj_with_mqa",
    "latent_norm": "kv_a_layernorm",
    "key_value": "kv_b_proj",
    "output": "o_proj",
}
_LATENT_ATTENTION = tuple(
    NameEntry(f"{ATTENTION}.{own}.{kind}", f"{LAYER}.self_attn.{stored}.{kind}")
    for own, stored in _STORED.items()
    for kind in ("weight", "bias")
)
_NAMES = name_map(NORMS, experts=MIXTURE)

NAME_MAP: NameMap = replace(
    _NAMES,
    entries=(
        *(entry for entry in _NAMES.entries if not entry.native.startswith(f"{ATTENTION}.")),
        *_LATENT_ATTENTION,
    ),
)
