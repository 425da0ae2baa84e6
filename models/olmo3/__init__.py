"""OLMo 3 (2025): OLMo 2 with windows in three of four layers."""

from ..family import Family, by_name
from ..llama.memory import activations
from ..olmo2.hf import NAME_MAP
from .config import Olmo3Config
from .gguf import GGUF
from .model import Olmo3ForCausalLM, Olmo3ForSequenceClassification, Olmo3Model
from .presets import PRESETS

FAMILY = Family(
    config=Olmo3Config,
    architectures=by_name(Olmo3ForCausalLM, Olmo3Model, Olmo3ForSequenceClassification),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Olmo3ForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "Olmo3ForCausalLM", "text2text-generation": "Olmo3ForCausalLM"},
)

__all__ = [
    "FAMILY",
    "Olmo3Config",
    "Olmo3ForCausalLM",
    "Olmo3ForSequenceClassification",
    "Olmo3Model",
]
