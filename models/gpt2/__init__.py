"""GPT-2 (Radford et al., 2019)."""

from .config import GPT2Config
from .hf import NAME_MAP
from .model import GPT2LMHeadModel as Model
from .presets import PRESETS

Config = GPT2Config

__all__ = ["NAME_MAP", "PRESETS", "Config", "GPT2Config", "Model"]
