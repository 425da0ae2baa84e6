"""GLM-4.5 (Zeng et al., 2025), and what declares a family of mixtures with corrected routers."""

from ..family import Family, by_name
from .config import Glm4MoeConfig
from .gguf import GGUF
from .hf import NAME_MAP
from .memory import activations
from .model import Glm4MoeForCausalLM, Glm4MoeModel
from .presets import PRESETS

FAMILY = Family(
    config=Glm4MoeConfig,
    architectures=by_name(Glm4MoeForCausalLM, Glm4MoeModel),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Glm4MoeForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "Glm4MoeForCausalLM", "text2text-generation": "Glm4MoeForCausalLM"},
)

__all__ = ["FAMILY", "Glm4MoeConfig", "Glm4MoeForCausalLM", "Glm4MoeModel"]
