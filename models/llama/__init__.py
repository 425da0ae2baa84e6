"""Llama (Touvron et al., 2023), and what declares a family of decoders like it."""

from ..family import Family, by_name
from .config import LlamaConfig
from .gguf import GGUF
from .hf import NAME_MAP
from .megatron import megatron
from .memory import activations
from .model import (
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=LlamaConfig,
    architectures=by_name(
        LlamaForCausalLM,
        LlamaModel,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
        LlamaForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "LlamaForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    megatron=megatron(LlamaConfig, windows=False),
    tasks={"text-generation": "LlamaForCausalLM", "text2text-generation": "LlamaForCausalLM"},
)

__all__ = [
    "FAMILY",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LlamaForQuestionAnswering",
    "LlamaForSequenceClassification",
    "LlamaForTokenClassification",
    "LlamaModel",
]
