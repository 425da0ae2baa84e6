"""mT5 (Xue et al., 2021): T5 v1.1 with a vocabulary for 101 languages."""

from ..t5.hf import NAME_MAP
from .config import MT5Config
from .model import MT5ForConditionalGeneration as Model
from .presets import PRESETS

Config = MT5Config

__all__ = ["NAME_MAP", "PRESETS", "Config", "MT5Config", "Model"]
