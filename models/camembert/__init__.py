"""CamemBERT (Martin et al., 2019): RoBERTa with a French vocabulary."""

from dataclasses import replace

from ..bert.memory import activations
from ..family import Family, by_name
from ..roberta.hf import NAME_MAP
from .config import CamembertConfig
from .model import (
    CamembertForCausalLM,
    CamembertForMaskedLM,
    CamembertForMultipleChoice,
    CamembertForQuestionAnswering,
    CamembertForSequenceClassification,
    CamembertForTokenClassification,
    CamembertModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=CamembertConfig,
    architectures=by_name(
        CamembertModel,
        CamembertForMaskedLM,
        CamembertForCausalLM,
        CamembertForSequenceClassification,
        CamembertForTokenClassification,
        CamembertForMultipleChoice,
        CamembertForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=replace(NAME_MAP, head_first="CamembertFor(MaskedLM|CausalLM)"),
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "CamembertForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
)

__all__ = [
    "FAMILY",
    "CamembertConfig",
    "CamembertForCausalLM",
    "CamembertForMaskedLM",
    "CamembertForMultipleChoice",
    "CamembertForQuestionAnswering",
    "CamembertForSequenceClassification",
    "CamembertForTokenClassification",
    "CamembertModel",
]
