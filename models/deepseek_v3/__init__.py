"""DeepSeek-V3 (DeepSeek-AI, 2024): mixtures with corrected scores, and compressed keys and values."""

from ..family import Family, by_name
from .config import DeepseekV3Config
from .gguf import GGUF
from .hf import NAME_MAP
from .memory import activations
from .model import (
    DeepseekV3ForCausalLM,
    DeepseekV3ForSequenceClassification,
    DeepseekV3ForTokenClassification,
    DeepseekV3Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=DeepseekV3Config,
    architectures=by_name(
        DeepseekV3ForCausalLM,
        DeepseekV3Model,
        DeepseekV3ForSequenceClassification,
        DeepseekV3ForTokenClassification,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "DeepseekV3ForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={
        "text-generation": "DeepseekV3ForCausalLM",
        "text2text-generation": "DeepseekV3ForCausalLM",
    },
)

__all__ = [
    "FAMILY",
    "DeepseekV3Config",
    "DeepseekV3ForCausalLM",
    "DeepseekV3ForSequenceClassification",
    "DeepseekV3ForTokenClassification",
    "DeepseekV3Model",
]
