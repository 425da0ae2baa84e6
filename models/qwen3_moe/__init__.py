"""Qwen3-MoE (Yang et al., 2025): Qwen3 with mixtures of experts."""

from ..family import Family, by_name
from ..mixtral.megatron import megatron
from ..mixtral.memory import activations
from .config import Qwen3MoeConfig
from .gguf import GGUF
from .hf import NAME_MAP
from .model import (
    Qwen3MoeForCausalLM,
    Qwen3MoeForQuestionAnswering,
    Qwen3MoeForSequenceClassification,
    Qwen3MoeForTokenClassification,
    Qwen3MoeModel,
)
from .presets import PRESETS
from .upcycling import describe_qwen3_moe

FAMILY = Family(
    config=Qwen3MoeConfig,
    architectures=by_name(
        Qwen3MoeForCausalLM,
        Qwen3MoeModel,
        Qwen3MoeForSequenceClassification,
        Qwen3MoeForTokenClassification,
        Qwen3MoeForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Qwen3MoeForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    megatron=megatron(Qwen3MoeConfig, qk_norm=True),
    upcycled={"qwen3": describe_qwen3_moe},
    tasks={"text-generation": "Qwen3MoeForCausalLM", "text2text-generation": "Qwen3MoeForCausalLM"},
)

__all__ = [
    "FAMILY",
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeForQuestionAnswering",
    "Qwen3MoeForSequenceClassification",
    "Qwen3MoeForTokenClassification",
    "Qwen3MoeModel",
]
