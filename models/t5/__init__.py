"""T5 (Raffel et al., 2020), versions 1.0 and 1.1."""

from .config import T5Config
from .hf import NAME_MAP
from .model import T5ForConditionalGeneration as Model
from .presets import PRESETS

Config = T5Config

__all__ = ["NAME_MAP", "PRESETS", "Config", "Model", "T5Config"]
