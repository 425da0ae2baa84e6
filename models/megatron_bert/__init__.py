"""Megatron-BERT (Shoeybi et al., 2019)."""

from ..family import Family, by_name
from .config import MegatronBertConfig
from .hf import NAME_MAP
from .megatron import MEGATRON
from .memory import activations
from .model import (
    MegatronBertForCausalLM,
    MegatronBertForMaskedLM,
    MegatronBertForMultipleChoice,
    MegatronBertForNextSentencePrediction,
    MegatronBertForPreTraining,
    MegatronBertForQuestionAnswering,
    MegatronBertForSequenceClassification,
    MegatronBertForTokenClassification,
    MegatronBertModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=MegatronBertConfig,
    architectures=by_name(
        MegatronBertModel,
        MegatronBertForMaskedLM,
        MegatronBertForCausalLM,
        MegatronBertForPreTraining,
        MegatronBertForNextSentencePrediction,
        MegatronBertForSequenceClassification,
        MegatronBertForTokenClassification,
        MegatronBertForMultipleChoice,
        MegatronBertForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder",
    objective="bert-sop",
    pretrains={"masked": "MegatronBertForMaskedLM", "sentence-pairs": "MegatronBertForPreTraining"},
    tokenizer="wordpiece",
    activations=activations,
    megatron=MEGATRON,
)

__all__ = [
    "FAMILY",
    "MegatronBertConfig",
    "MegatronBertForCausalLM",
    "MegatronBertForMaskedLM",
    "MegatronBertForMultipleChoice",
    "MegatronBertForNextSentencePrediction",
    "MegatronBertForPreTraining",
    "MegatronBertForQuestionAnswering",
    "MegatronBertForSequenceClassification",
    "MegatronBertForTokenClassification",
    "MegatronBertModel",
]
