"""BART (Lewis et al., 2020)."""

from ..heads import with_heads
from ..registry import Family
from . import decoder
from .config import BartConfig
from .hf import NAME_MAP
from .memory import activations
from .model import HEADS, BartBody
from .presets import PRESETS

FAMILY = Family(
    config=BartConfig,
    architectures=with_heads(BartBody, "Bart", HEADS)
    | with_heads(decoder.BartDecoderBody, "Bart", decoder.HEADS),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder-decoder",
    objective="bart",
    pretrains={"seq2seq": "BartForConditionalGeneration"},
    tokenizer="roberta-bpe",
    activations=activations,
    tasks={"text2text-generation": "BartForConditionalGeneration"},
)

__all__ = ["FAMILY", "BartConfig"]
