"""Mistral (Jiang et al., 2023): Llama with attention within a sliding window."""

from ..family import Family, by_name
from ..llama.hf import NAME_MAP
from ..llama.megatron import megatron
from ..llama.memory import activations
from .config import MistralConfig
from .model import (
    MistralForCausalLM,
    MistralForQuestionAnswering,
    MistralForSequenceClassification,
    MistralForTokenClassification,
    MistralModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=MistralConfig,
    architectures=by_name(
        MistralForCausalLM,
        MistralModel,
        MistralForSequenceClassification,
        MistralForTokenClassification,
        MistralForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "MistralForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    megatron=megatron(MistralConfig, windows=True),
    tasks={"text-generation": "MistralForCausalLM", "text2text-generation": "MistralForCausalLM"},
)

__all__ = [
    "FAMILY",
    "MistralConfig",
    "MistralForCausalLM",
    "MistralForQuestionAnswering",
    "MistralForSequenceClassification",
    "MistralForTokenClassification",
    "MistralModel",
]
