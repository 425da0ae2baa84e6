"""Mistral (Jiang et al., 2023): Llama with attention within a sliding window."""

from ..llama import decoder_family
from ..llama.hf import NAME_MAP
from ..llama.megatron import megatron
from .config import MistralConfig
from .presets import PRESETS

FAMILY = decoder_family(
    MistralConfig, "Mistral", NAME_MAP, PRESETS, megatron=megatron(MistralConfig, inferred=False)
)

__all__ = ["FAMILY", "MistralConfig"]
