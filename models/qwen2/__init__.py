"""Qwen2 and Qwen2.5 (Yang et al., 2024):

Llama with biases of queries, keys and values, and windows in some layers.
"""

from ..family import Family, by_name
from ..llama.gguf import gguf
from ..llama.hf import NAME_MAP
from ..llama.megatron import megatron
from ..llama.memory import activations
from .config import Qwen2Config
from .model import (
    Qwen2ForCausalLM,
    Qwen2ForQuestionAnswering,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=Qwen2Config,
    architectures=by_name(
        Qwen2ForCausalLM,
        Qwen2Model,
        Qwen2ForSequenceClassification,
        Qwen2ForTokenClassification,
        Qwen2ForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Qwen2ForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[gguf("qwen2", "Qwen2ForCausalLM")],
    megatron=megatron(Qwen2Config, bias=True),
    tasks={"text-generation": "Qwen2ForCausalLM", "text2text-generation": "Qwen2ForCausalLM"},
)

__all__ = [
    "FAMILY",
    "Qwen2Config",
    "Qwen2ForCausalLM",
    "Qwen2ForQuestionAnswering",
    "Qwen2ForSequenceClassification",
    "Qwen2ForTokenClassification",
    "Qwen2Model",
]
