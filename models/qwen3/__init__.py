"""Qwen3 (Yang et al., 2025): Llama with norms of each head's queries and keys."""

from ..family import Family, by_name
from ..llama.gguf import HEAD_SIZE, gguf
from ..llama.hf import NAME_MAP
from ..llama.megatron import megatron
from ..llama.memory import activations
from .config import Qwen3Config
from .model import (
    Qwen3ForCausalLM,
    Qwen3ForQuestionAnswering,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=Qwen3Config,
    architectures=by_name(
        Qwen3ForCausalLM,
        Qwen3Model,
        Qwen3ForSequenceClassification,
        Qwen3ForTokenClassification,
        Qwen3ForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Qwen3ForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[gguf("qwen3", "Qwen3ForCausalLM", keys=HEAD_SIZE)],
    megatron=megatron(Qwen3Config, qk_norm=True),
    tasks={"text-generation": "Qwen3ForCausalLM", "text2text-generation": "Qwen3ForCausalLM"},
)

__all__ = [
    "FAMILY",
    "Qwen3Config",
    "Qwen3ForCausalLM",
    "Qwen3ForQuestionAnswering",
    "Qwen3ForSequenceClassification",
    "Qwen3ForTokenClassification",
    "Qwen3Model",
]
