"""XLM-RoBERTa (Conneau et al., 2019): RoBERTa with a multilingual vocabulary."""

from dataclasses import replace

from ..bert.memory import activations
from ..family import Family, by_name
from ..roberta.hf import NAME_MAP
from .config import XLMRobertaConfig
from .model import (
    XLMRobertaForCausalLM,
    XLMRobertaForMaskedLM,
    XLMRobertaForMultipleChoice,
    XLMRobertaForQuestionAnswering,
    XLMRobertaForSequenceClassification,
    XLMRobertaForTokenClassification,
    XLMRobertaModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=XLMRobertaConfig,
    architectures=by_name(
        XLMRobertaModel,
        XLMRobertaForMaskedLM,
        XLMRobertaForCausalLM,
        XLMRobertaForSequenceClassification,
        XLMRobertaForTokenClassification,
        XLMRobertaForMultipleChoice,
        XLMRobertaForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=replace(NAME_MAP, head_first="XLMRobertaFor(MaskedLM|CausalLM)"),
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "XLMRobertaForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
)

__all__ = [
    "FAMILY",
    "XLMRobertaConfig",
    "XLMRobertaForCausalLM",
    "XLMRobertaForMaskedLM",
    "XLMRobertaForMultipleChoice",
    "XLMRobertaForQuestionAnswering",
    "XLMRobertaForSequenceClassification",
    "XLMRobertaForTokenClassification",
    "XLMRobertaModel",
]
