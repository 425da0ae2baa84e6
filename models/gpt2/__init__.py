"""GPT-2 (Radford et al., 2019)."""

from ..heads import with_heads
from ..registry import Family
from .config import GPT2Config
from .hf import NAME_MAP
from .megatron import MEGATRON
from .memory import activations
from .model import HEADS, GPT2Body
from .presets import PRESETS

FAMILY = Family(
    config=GPT2Config,
    architectures=with_heads(GPT2Body, "GPT2", HEADS),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "GPT2LMHeadModel"},
    tokenizer="bpe",
    activations=activations,
    megatron=MEGATRON,
    tasks={"text-generation": "GPT2LMHeadModel", "text2text-generation": "GPT2LMHeadModel"},
)

__all__ = ["FAMILY", "GPT2Config"]
