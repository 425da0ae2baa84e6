"""Qwen3 (Yang et al., 2025): Llama with norms of each head's queries and keys."""

from ..llama import decoder_family
from ..llama.hf import NAME_MAP
from ..llama.megatron import megatron
from .config import Qwen3Config
from .presets import PRESETS

FAMILY = decoder_family(
    Qwen3Config, "Qwen3", NAME_MAP, PRESETS, megatron=megatron(Qwen3Config, qk_norm=True)
)

__all__ = ["FAMILY", "Qwen3Config"]
