"""Qwen2-MoE (Qwen Team, 2024): Qwen2 with mixtures and a shared expert."""

from ..family import Family, by_name
from ..mixtral.memory import activations
from .config import Qwen2MoeConfig
from .gguf import GGUF
from .hf import NAME_MAP
from .model import (
    Qwen2MoeForCausalLM,
    Qwen2MoeForQuestionAnswering,
    Qwen2MoeForSequenceClassification,
    Qwen2MoeForTokenClassification,
    Qwen2MoeModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=Qwen2MoeConfig,
    architectures=by_name(
        Qwen2MoeForCausalLM,
        Qwen2MoeModel,
        Qwen2MoeForSequenceClassification,
        Qwen2MoeForTokenClassification,
        Qwen2MoeForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Qwen2MoeForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "Qwen2MoeForCausalLM", "text2text-generation": "Qwen2MoeForCausalLM"},
)

__all__ = [
    "FAMILY",
    "Qwen2MoeConfig",
    "Qwen2MoeForCausalLM",
    "Qwen2MoeForQuestionAnswering",
    "Qwen2MoeForSequenceClassification",
    "Qwen2MoeForTokenClassification",
    "Qwen2MoeModel",
]
