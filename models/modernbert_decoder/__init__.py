"""ModernBERT's decoder (Weller et al., 2025): a ModernBERT that attends to earlier tokens."""

from ..family import Family, by_name
from .config import ModernBertDecoderConfig
from .hf import NAME_MAP
from .memory import activations
from .model import (
    ModernBertDecoderForCausalLM,
    ModernBertDecoderForSequenceClassification,
    ModernBertDecoderModel,
)
from .presets import PRESETS

_GENERATOR = "ModernBertDecoderForCausalLM"

FAMILY = Family(
    config=ModernBertDecoderConfig,
    architectures=by_name(
        ModernBertDecoderForCausalLM,
        ModernBertDecoderModel,
        ModernBertDecoderForSequenceClassification,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": _GENERATOR},
    tokenizer="bpe",
    activations=activations,
    tasks={"text-generation": _GENERATOR, "text2text-generation": _GENERATOR},
)

__all__ = [
    "FAMILY",
    "ModernBertDecoderConfig",
    "ModernBertDecoderForCausalLM",
    "ModernBertDecoderForSequenceClassification",
    "ModernBertDecoderModel",
]
