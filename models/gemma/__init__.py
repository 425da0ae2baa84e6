"""Gemma (2024): Llama with norms that add 1 to their weights, and scaled embeddings."""

from ..family import Family, by_name
from ..llama.hf import NAME_MAP
from ..llama.memory import activations
from .config import GemmaConfig
from .gguf import GGUF
from .model import (
    GemmaForCausalLM,
    GemmaForSequenceClassification,
    GemmaForTokenClassification,
    GemmaModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=GemmaConfig,
    architectures=by_name(
        GemmaForCausalLM, GemmaModel, GemmaForSequenceClassification, GemmaForTokenClassification
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "GemmaForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "GemmaForCausalLM", "text2text-generation": "GemmaForCausalLM"},
)

__all__ = [
    "FAMILY",
    "GemmaConfig",
    "GemmaForCausalLM",
    "GemmaForSequenceClassification",
    "GemmaForTokenClassification",
    "GemmaModel",
]
