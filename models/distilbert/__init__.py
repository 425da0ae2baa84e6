"""DistilBERT (Sanh et al., 2019):

BERT without segments and pooler, and with its own names for everything.
"""

from ..bert.memory import activations
from ..family import Family, by_name
from .config import DistilBertConfig
from .hf import NAME_MAP
from .model import (
    DistilBertForMaskedLM,
    DistilBertForMultipleChoice,
    DistilBertForQuestionAnswering,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    DistilBertModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=DistilBertConfig,
    architectures=by_name(
        DistilBertModel,
        DistilBertForMaskedLM,
        DistilBertForSequenceClassification,
        DistilBertForTokenClassification,
        DistilBertForQuestionAnswering,
        DistilBertForMultipleChoice,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "DistilBertForMaskedLM"},
    tokenizer="wordpiece",
    activations=activations,
)

__all__ = [
    "FAMILY",
    "DistilBertConfig",
    "DistilBertForMaskedLM",
    "DistilBertForMultipleChoice",
    "DistilBertForQuestionAnswering",
    "DistilBertForSequenceClassification",
    "DistilBertForTokenClassification",
    "DistilBertModel",
]
