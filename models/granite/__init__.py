"""Granite 3 (2024): Llama with scaled embeddings, residuals, scores and logits."""

from ..family import Family, by_name
from ..llama.hf import NAME_MAP
from ..llama.memory import activations
from .config import GraniteConfig
from .gguf import GGUF
from .model import GraniteForCausalLM, GraniteModel
from .presets import PRESETS

FAMILY = Family(
    config=GraniteConfig,
    architectures=by_name(GraniteForCausalLM, GraniteModel),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "GraniteForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "GraniteForCausalLM", "text2text-generation": "GraniteForCausalLM"},
)

__all__ = ["FAMILY", "GraniteConfig", "GraniteForCausalLM", "GraniteModel"]
