"""The original GLM (Du et al., 2021), not the GLM-4 line of 2024."""

from ..family import Family
from .config import GLMConfig
from .hf import NAME_MAP, has_config, infer_config
from .memory import activations
from .model import GLMForConditionalGeneration
from .presets import PRESETS
from .text import GLMText

FAMILY = Family(
    config=GLMConfig,
    architectures={"GLMModel": GLMForConditionalGeneration},
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="decoder",
    objective="glm",
    pretrains={"blanks": "GLMModel"},
    tokenizer="glm-bpe",
    activations=activations,
    tasks={"text2text-generation": "GLMModel"},
    in_transformers=False,  # transformers' "glm" is the GLM-4 line
    masks_padding=False,
    blank_text=GLMText,
    has_config=has_config,
    infer_config=infer_config,
)

__all__ = ["FAMILY", "GLMConfig", "GLMForConditionalGeneration"]
