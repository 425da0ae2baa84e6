"""Gemma 2 (2024): Gemma with windows, more norms, and capped scores and logits."""

from ..family import Family, by_name
from ..llama.memory import activations
from .config import Gemma2Config
from .gguf import GGUF
from .hf import NAME_MAP
from .model import (
    Gemma2ForCausalLM,
    Gemma2ForSequenceClassification,
    Gemma2ForTokenClassification,
    Gemma2Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=Gemma2Config,
    architectures=by_name(
        Gemma2ForCausalLM,
        Gemma2Model,
        Gemma2ForSequenceClassification,
        Gemma2ForTokenClassification,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Gemma2ForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "Gemma2ForCausalLM", "text2text-generation": "Gemma2ForCausalLM"},
)

__all__ = [
    "FAMILY",
    "Gemma2Config",
    "Gemma2ForCausalLM",
    "Gemma2ForSequenceClassification",
    "Gemma2ForTokenClassification",
    "Gemma2Model",
]
