"""T5 (Raffel et al., 2020), versions 1.0 and 1.1."""

from ..family import Family, by_name
from .config import T5Config
from .gguf import GGUF
from .hf import NAME_MAP
from .megatron import megatron
from .memory import activations
from .model import (
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForQuestionAnswering,
    T5ForSequenceClassification,
    T5ForTokenClassification,
    T5Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=T5Config,
    architectures=by_name(
        T5ForConditionalGeneration,
        T5Model,
        T5ForSequenceClassification,
        T5ForQuestionAnswering,
        T5EncoderModel,
        T5ForTokenClassification,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder-decoder",
    objective="t5",
    pretrains={"seq2seq": "T5ForConditionalGeneration"},
    tokenizer="sentencepiece",
    activations=activations,
    gguf=GGUF,
    megatron=megatron(),
    tasks={"text2text-generation": "T5ForConditionalGeneration"},
    tokenizers={"ByT5Tokenizer": "bytes"},
)

__all__ = [
    "FAMILY",
    "T5Config",
    "T5EncoderModel",
    "T5ForConditionalGeneration",
    "T5ForQuestionAnswering",
    "T5ForSequenceClassification",
    "T5ForTokenClassification",
    "T5Model",
]
