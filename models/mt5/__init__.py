"""mT5 (Xue et al., 2021, "mT5:

A massively multilingual pre-trained text-to-text transformer"): T5 v1.1, untied.
"""

from ..family import Family, by_name
from ..t5.hf import NAME_MAP
from ..t5.megatron import megatron
from ..t5.memory import activations
from .config import MT5Config
from .model import (
    MT5EncoderModel,
    MT5ForConditionalGeneration,
    MT5ForQuestionAnswering,
    MT5ForSequenceClassification,
    MT5ForTokenClassification,
    MT5Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=MT5Config,
    architectures=by_name(
        MT5ForConditionalGeneration,
        MT5Model,
        MT5ForSequenceClassification,
        MT5ForQuestionAnswering,
        MT5EncoderModel,
        MT5ForTokenClassification,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder-decoder",
    objective="t5",
    pretrains={"seq2seq": "MT5ForConditionalGeneration"},
    tokenizer="sentencepiece",
    activations=activations,
    megatron=megatron(inferred=False),
    tasks={"text2text-generation": "MT5ForConditionalGeneration"},
)

__all__ = [
    "FAMILY",
    "MT5Config",
    "MT5EncoderModel",
    "MT5ForConditionalGeneration",
    "MT5ForQuestionAnswering",
    "MT5ForSequenceClassification",
    "MT5ForTokenClassification",
    "MT5Model",
]
