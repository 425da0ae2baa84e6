"""The original GLM (Du et al., 2021), not the GLM-4 line of 2024."""

from .config import GLMConfig
from .hf import NAME_MAP
from .model import GLMForConditionalGeneration as Model
from .presets import PRESETS

Config = GLMConfig

__all__ = ["NAME_MAP", "PRESETS", "Config", "GLMConfig", "Model"]
