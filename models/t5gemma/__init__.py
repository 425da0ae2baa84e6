"""T5Gemma (2025): an encoder-decoder of two Gemma 2s."""

from ..family import Family, by_name
from .config import T5GemmaConfig, T5GemmaModuleConfig
from .hf import NAME_MAP
from .memory import activations
from .model import (
    T5GemmaEncoderModel,
    T5GemmaForConditionalGeneration,
    T5GemmaForSequenceClassification,
    T5GemmaForTokenClassification,
    T5GemmaModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=T5GemmaConfig,
    architectures=by_name(
        T5GemmaForConditionalGeneration,
        T5GemmaModel,
        T5GemmaEncoderModel,
        T5GemmaForSequenceClassification,
        T5GemmaForTokenClassification,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder-decoder",
    objective="t5",
    pretrains={"seq2seq": "T5GemmaForConditionalGeneration"},
    tokenizer="sentencepiece",
    activations=activations,
    tasks={"text2text-generation": "T5GemmaForConditionalGeneration"},
)

__all__ = [
    "FAMILY",
    "T5GemmaConfig",
    "T5GemmaEncoderModel",
    "T5GemmaForConditionalGeneration",
    "T5GemmaForSequenceClassification",
    "T5GemmaForTokenClassification",
    "T5GemmaModel",
    "T5GemmaModuleConfig",
]
