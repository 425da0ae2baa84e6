"""Gemma 3's language model (2025): Gemma 2 with rotations by layer, and norms instead of caps."""

from ..family import Family, by_name
from ..gemma2.hf import NAME_MAP
from ..llama.memory import activations
from .config import Gemma3TextConfig
from .gguf import GGUF
from .model import Gemma3ForCausalLM, Gemma3TextForSequenceClassification, Gemma3TextModel
from .presets import PRESETS

FAMILY = Family(
    config=Gemma3TextConfig,
    architectures=by_name(Gemma3ForCausalLM, Gemma3TextModel, Gemma3TextForSequenceClassification),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Gemma3ForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "Gemma3ForCausalLM", "text2text-generation": "Gemma3ForCausalLM"},
)

__all__ = [
    "FAMILY",
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    "Gemma3TextForSequenceClassification",
    "Gemma3TextModel",
]
