"""OLMoE (Muennighoff et al., 2024)."""

from ..family import Family, by_name
from ..mixtral.memory import activations
from .config import OlmoeConfig
from .gguf import GGUF
from .hf import NAME_MAP
from .model import OlmoeForCausalLM, OlmoeModel
from .presets import PRESETS

FAMILY = Family(
    config=OlmoeConfig,
    architectures=by_name(OlmoeForCausalLM, OlmoeModel),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "OlmoeForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "OlmoeForCausalLM", "text2text-generation": "OlmoeForCausalLM"},
)

__all__ = ["FAMILY", "OlmoeConfig", "OlmoeForCausalLM", "OlmoeModel"]
