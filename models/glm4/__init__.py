"""GLM-4-0414 (2025), a decoder like Llama: half of each head rotates, and all outputs are normed."""

from ..family import Family, by_name
from ..llama.memory import activations
from .config import Glm4Config
from .gguf import GGUF
from .hf import NAME_MAP
from .model import (
    Glm4ForCausalLM,
    Glm4ForSequenceClassification,
    Glm4ForTokenClassification,
    Glm4Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=Glm4Config,
    architectures=by_name(
        Glm4ForCausalLM, Glm4Model, Glm4ForSequenceClassification, Glm4ForTokenClassification
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Glm4ForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "Glm4ForCausalLM", "text2text-generation": "Glm4ForCausalLM"},
)

__all__ = [
    "FAMILY",
    "Glm4Config",
    "Glm4ForCausalLM",
    "Glm4ForSequenceClassification",
    "Glm4ForTokenClassification",
    "Glm4Model",
]
