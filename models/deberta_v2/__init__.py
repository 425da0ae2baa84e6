"""DeBERTa-v2 and v3 (He et al., 2020, 2021): BERT with disentangled attention."""

from ..family import Family, by_name
from .config import DebertaV2Config
from .hf import NAME_MAP
from .memory import activations
from .model import (
    DebertaV2ForMaskedLM,
    DebertaV2ForMultipleChoice,
    DebertaV2ForQuestionAnswering,
    DebertaV2ForSequenceClassification,
    DebertaV2ForTokenClassification,
    DebertaV2Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=DebertaV2Config,
    architectures=by_name(
        DebertaV2Model,
        DebertaV2ForMaskedLM,
        DebertaV2ForSequenceClassification,
        DebertaV2ForTokenClassification,
        DebertaV2ForQuestionAnswering,
        DebertaV2ForMultipleChoice,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "DebertaV2ForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
)

__all__ = [
    "FAMILY",
    "DebertaV2Config",
    "DebertaV2ForMaskedLM",
    "DebertaV2ForMultipleChoice",
    "DebertaV2ForQuestionAnswering",
    "DebertaV2ForSequenceClassification",
    "DebertaV2ForTokenClassification",
    "DebertaV2Model",
]
