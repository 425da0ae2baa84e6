"""ModernBERT (Warner et al., 2024)."""

from ..family import Family, by_name
from .config import ModernBertConfig
from .heads import (
    ModernBertForMaskedLM,
    ModernBertForMultipleChoice,
    ModernBertForQuestionAnswering,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertModel,
)
from .hf import NAME_MAP
from .memory import activations
from .presets import PRESETS

FAMILY = Family(
    config=ModernBertConfig,
    architectures=by_name(
        ModernBertModel,
        ModernBertForMaskedLM,
        ModernBertForSequenceClassification,
        ModernBertForTokenClassification,
        ModernBertForQuestionAnswering,
        ModernBertForMultipleChoice,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "ModernBertForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
)

__all__ = [
    "FAMILY",
    "ModernBertConfig",
    "ModernBertForMaskedLM",
    "ModernBertForMultipleChoice",
    "ModernBertForQuestionAnswering",
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
    "ModernBertModel",
]
