"""BERT (Devlin et al., 2018)."""

from ..family import Family, by_name
from .config import BertConfig
from .hf import NAME_MAP
from .megatron import MEGATRON
from .memory import activations
from .model import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=BertConfig,
    architectures=by_name(
        BertModel,
        BertForMaskedLM,
        BertLMHeadModel,
        BertForPreTraining,
        BertForNextSentencePrediction,
        BertForSequenceClassification,
        BertForTokenClassification,
        BertForMultipleChoice,
        BertForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder",
    objective="bert-nsp",
    pretrains={"masked": "BertForMaskedLM", "sentence-pairs": "BertForPreTraining"},
    tokenizer="wordpiece",
    activations=activations,
    megatron=MEGATRON,
)

__all__ = [
    "FAMILY",
    "BertConfig",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertLMHeadModel",
    "BertModel",
]
