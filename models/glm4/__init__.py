"""GLM-4-0414 (2025), a decoder like Llama: half of each head rotates, and all outputs are normed."""

from ..llama import HEADS, decoder_family
from .config import Glm4Config
from .hf import NAME_MAP
from .presets import PRESETS

FAMILY = decoder_family(Glm4Config, "Glm4", NAME_MAP, PRESETS, HEADS)

__all__ = ["FAMILY", "Glm4Config"]
