"""Maps each native parameter of gpt-oss to its tensors in Hugging Face's checkpoints.

A file has one tensor of all experts, [E, in, out], for each of their two projections, and one for
each bias. The columns of the first projection are those of the gate and of up in turn.
"""

from __future__ import annotations

from dataclasses import replace

from ..llama.hf import ATTENTION, LAYER, MLP, name_map
from ..mixtral.hf import NORMS
from ..name_map import NameEntry, NameMap

_STORED = f"{LAYER}.mlp.experts"
_EXPERTS = (
    *(NameEntry(f"{MLP}.router.{k}", f"{LAYER}.mlp.router.{k}") for k in ("weight", "bias")),
    NameEntry(f"{MLP}.experts.gate_up", f"{_STORED}.gate_up_proj", transpose=True, by_expert=True),
    NameEntry(f"{MLP}.experts.gate_up_bias", f"{_STORED}.gate_up_proj_bias", by_expert=True),
    NameEntry(f"{MLP}.experts.down", f"{_STORED}.down_proj", by_expert=True),
    NameEntry(f"{MLP}.experts.down_bias", f"{_STORED}.down_proj_bias", by_expert=True),
)
_NAMES = name_map(NORMS, experts=_EXPERTS)

NAME_MAP: NameMap = replace(
    _NAMES,
    entries=(*_NAMES.entries, NameEntry(f"{ATTENTION}.core.sinks", f"{LAYER}.self_attn.sinks")),
)
