"""GPT-2 (Radford et al., 2019)."""

from ..family import Family, by_name
from .config import GPT2Config
from .gguf import GGUF
from .hf import NAME_MAP
from .megatron import MEGATRON
from .memory import activations
from .model import (
    GPT2DoubleHeadsModel,
    GPT2ForQuestionAnswering,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    GPT2Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=GPT2Config,
    architectures=by_name(
        GPT2LMHeadModel,
        GPT2DoubleHeadsModel,
        GPT2Model,
        GPT2ForSequenceClassification,
        GPT2ForTokenClassification,
        GPT2ForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "GPT2LMHeadModel"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    megatron=MEGATRON,
    tasks={"text-generation": "GPT2LMHeadModel", "text2text-generation": "GPT2LMHeadModel"},
)

__all__ = [
    "FAMILY",
    "GPT2Config",
    "GPT2DoubleHeadsModel",
    "GPT2ForQuestionAnswering",
    "GPT2ForSequenceClassification",
    "GPT2ForTokenClassification",
    "GPT2LMHeadModel",
    "GPT2Model",
]
