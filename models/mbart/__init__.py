"""mBART (Liu et al., 2020): BART with pre-LayerNorm, for many languages."""

from ..bart import decoder
from ..bart.hf import NAME_MAP
from ..bart.memory import activations
from ..heads import with_heads
from ..registry import Family
from .config import MBartConfig
from .model import HEADS, MBartBody
from .presets import PRESETS

FAMILY = Family(
    config=MBartConfig,
    architectures=with_heads(MBartBody, "MBart", HEADS)
    | with_heads(decoder.BartDecoderBody, "MBart", decoder.HEADS),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder-decoder",
    objective="mbart",
    pretrains={"seq2seq": "MBartForConditionalGeneration"},
    tokenizer="roberta-bpe",
    activations=activations,
    tasks={"text2text-generation": "MBartForConditionalGeneration"},
)

__all__ = ["FAMILY", "MBartConfig"]
