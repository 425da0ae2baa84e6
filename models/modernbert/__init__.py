"""ModernBERT (Warner et al., 2024)."""

from ..heads import with_heads
from ..registry import Family
from .config import ModernBertConfig
from .heads import HEADS
from .hf import NAME_MAP
from .memory import activations
from .model import ModernBertBody
from .presets import PRESETS

FAMILY = Family(
    config=ModernBertConfig,
    architectures=with_heads(ModernBertBody, "ModernBert", HEADS),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "ModernBertForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
)

__all__ = ["FAMILY", "ModernBertConfig"]
