"""EuroBERT (Boizard et al., 2025)."""

from ..family import Family, by_name
from .config import EuroBertConfig
from .hf import NAME_MAP
from .memory import activations
from .model import (
    EuroBertForMaskedLM,
    EuroBertForSequenceClassification,
    EuroBertForTokenClassification,
    EuroBertModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=EuroBertConfig,
    architectures=by_name(
        EuroBertForMaskedLM,
        EuroBertModel,
        EuroBertForSequenceClassification,
        EuroBertForTokenClassification,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "EuroBertForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
)

__all__ = [
    "FAMILY",
    "EuroBertConfig",
    "EuroBertForMaskedLM",
    "EuroBertForSequenceClassification",
    "EuroBertForTokenClassification",
    "EuroBertModel",
]
