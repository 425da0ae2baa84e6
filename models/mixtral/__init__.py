"""Mixtral (Jiang et al., 2024), and what declares a family of mixtures like it."""

from ..family import Family, by_name
from .config import MixtralConfig
from .gguf import GGUF
from .hf import NAME_MAP
from .megatron import megatron
from .memory import activations
from .model import (
    MixtralForCausalLM,
    MixtralForQuestionAnswering,
    MixtralForSequenceClassification,
    MixtralForTokenClassification,
    MixtralModel,
)
from .presets import PRESETS
from .upcycling import describe_mixtral

FAMILY = Family(
    config=MixtralConfig,
    architectures=by_name(
        MixtralForCausalLM,
        MixtralModel,
        MixtralForSequenceClassification,
        MixtralForTokenClassification,
        MixtralForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "MixtralForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    megatron=megatron(MixtralConfig),
    upcycled={"llama": describe_mixtral, "mistral": describe_mixtral},
    tasks={"text-generation": "MixtralForCausalLM", "text2text-generation": "MixtralForCausalLM"},
)

__all__ = [
    "FAMILY",
    "MixtralConfig",
    "MixtralForCausalLM",
    "MixtralForQuestionAnswering",
    "MixtralForSequenceClassification",
    "MixtralForTokenClassification",
    "MixtralModel",
]
