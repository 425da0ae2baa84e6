"""T5Gemma 2 (2025): an encoder-decoder of two Gemma 3s whose decoder has one attention a block."""

from ..family import Family, by_name
from .config import T5Gemma2Config, T5Gemma2TextConfig
from .hf import NAME_MAP
from .memory import activations
from .model import (
    T5Gemma2ForConditionalGeneration,
    T5Gemma2ForSequenceClassification,
    T5Gemma2ForTokenClassification,
    T5Gemma2Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=T5Gemma2Config,
    architectures=by_name(
        T5Gemma2ForConditionalGeneration,
        T5Gemma2Model,
        T5Gemma2ForSequenceClassification,
        T5Gemma2ForTokenClassification,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder-decoder",
    objective="t5",
    pretrains={"seq2seq": "T5Gemma2ForConditionalGeneration"},
    tokenizer="bpe",
    activations=activations,
    tasks={"text2text-generation": "T5Gemma2ForConditionalGeneration"},
)

__all__ = [
    "FAMILY",
    "T5Gemma2Config",
    "T5Gemma2ForConditionalGeneration",
    "T5Gemma2ForSequenceClassification",
    "T5Gemma2ForTokenClassification",
    "T5Gemma2Model",
    "T5Gemma2TextConfig",
]
