"""ELECTRA (Clark et al., 2020)."""

from ..bert.memory import activations
from ..bert.model import BertBody
from ..heads import with_heads
from ..registry import Family
from .config import ElectraConfig
from .hf import NAME_MAP
from .model import HEADS
from .presets import PRESETS

FAMILY = Family(
    config=ElectraConfig,
    architectures=with_heads(BertBody, "Electra", HEADS),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "ElectraForMaskedLM"},
    tokenizer="wordpiece",
    activations=activations,
)

__all__ = ["FAMILY", "ElectraConfig"]
