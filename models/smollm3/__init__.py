"""SmolLM3 (2025): Llama in which each fourth layer does not rotate queries and keys."""

from ..family import Family, by_name
from ..llama.hf import NAME_MAP
from ..llama.memory import activations
from .config import SmolLM3Config
from .gguf import GGUF
from .model import (
    SmolLM3ForCausalLM,
    SmolLM3ForQuestionAnswering,
    SmolLM3ForSequenceClassification,
    SmolLM3ForTokenClassification,
    SmolLM3Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=SmolLM3Config,
    architectures=by_name(
        SmolLM3ForCausalLM,
        SmolLM3Model,
        SmolLM3ForSequenceClassification,
        SmolLM3ForTokenClassification,
        SmolLM3ForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "SmolLM3ForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "SmolLM3ForCausalLM", "text2text-generation": "SmolLM3ForCausalLM"},
)

__all__ = [
    "FAMILY",
    "SmolLM3Config",
    "SmolLM3ForCausalLM",
    "SmolLM3ForQuestionAnswering",
    "SmolLM3ForSequenceClassification",
    "SmolLM3ForTokenClassification",
    "SmolLM3Model",
]
