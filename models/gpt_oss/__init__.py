"""gpt-oss (OpenAI, 2025)."""

from ..family import Family, by_name
from .config import GptOssConfig
from .gguf import GGUF
from .hf import NAME_MAP
from .memory import activations
from .model import (
    GptOssForCausalLM,
    GptOssForSequenceClassification,
    GptOssForTokenClassification,
    GptOssModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=GptOssConfig,
    architectures=by_name(
        GptOssForCausalLM,
        GptOssModel,
        GptOssForSequenceClassification,
        GptOssForTokenClassification,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "GptOssForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "GptOssForCausalLM", "text2text-generation": "GptOssForCausalLM"},
)

__all__ = [
    "FAMILY",
    "GptOssConfig",
    "GptOssForCausalLM",
    "GptOssForSequenceClassification",
    "GptOssForTokenClassification",
    "GptOssModel",
]
