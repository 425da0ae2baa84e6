"""BART (Lewis et al., 2020)."""

from ..family import Family, by_name
from .config import BartConfig
from .decoder import BartForCausalLM
from .hf import NAME_MAP
from .memory import activations
from .model import (
    BartEncoder,
    BartForConditionalGeneration,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BartModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=BartConfig,
    architectures=by_name(
        BartForConditionalGeneration,
        BartModel,
        BartEncoder,
        BartForSequenceClassification,
        BartForQuestionAnswering,
        BartForCausalLM,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder-decoder",
    objective="bart",
    pretrains={"seq2seq": "BartForConditionalGeneration"},
    tokenizer="roberta-bpe",
    activations=activations,
    tasks={"text2text-generation": "BartForConditionalGeneration"},
)

__all__ = [
    "FAMILY",
    "BartConfig",
    "BartEncoder",
    "BartForCausalLM",
    "BartForConditionalGeneration",
    "BartForQuestionAnswering",
    "BartForSequenceClassification",
    "BartModel",
]
