"""mBART (Liu et al., 2020): BART with pre-LayerNorm, for many languages."""

from ..bart.hf import NAME_MAP
from ..bart.memory import activations
from ..family import Family, by_name
from .config import MBartConfig
from .model import (
    MBartEncoder,
    MBartForCausalLM,
    MBartForConditionalGeneration,
    MBartForQuestionAnswering,
    MBartForSequenceClassification,
    MBartModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=MBartConfig,
    architectures=by_name(
        MBartForConditionalGeneration,
        MBartModel,
        MBartEncoder,
        MBartForSequenceClassification,
        MBartForQuestionAnswering,
        MBartForCausalLM,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder-decoder",
    objective="mbart",
    pretrains={"seq2seq": "MBartForConditionalGeneration"},
    tokenizer="roberta-bpe",
    activations=activations,
    tasks={"text2text-generation": "MBartForConditionalGeneration"},
)

__all__ = [
    "FAMILY",
    "MBartConfig",
    "MBartEncoder",
    "MBartForCausalLM",
    "MBartForConditionalGeneration",
    "MBartForQuestionAnswering",
    "MBartForSequenceClassification",
    "MBartModel",
]
