"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases of queries, keys and values, and windows in some layers."""

from ..llama import decoder_family
from ..llama.hf import NAME_MAP
from ..llama.megatron import megatron
from .config import Qwen2Config
from .presets import PRESETS

FAMILY = decoder_family(
    Qwen2Config, "Qwen2", NAME_MAP, PRESETS, megatron=megatron(Qwen2Config, bias=True)
)

__all__ = ["FAMILY", "Qwen2Config"]
