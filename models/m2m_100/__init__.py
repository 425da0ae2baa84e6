"""M2M100 (Fan et al., 2020) and NLLB (NLLB Team, 2022)."""

from ..bart.hf import NAME_MAP
from ..bart.memory import activations
from ..bart.model import BartBody
from ..heads import with_heads
from ..registry import Family
from .config import M2M100Config
from .model import HEADS
from .presets import PRESETS

FAMILY = Family(
    config=M2M100Config,
    architectures=with_heads(BartBody, "M2M100", HEADS),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder-decoder",
    objective="bart",
    pretrains={"seq2seq": "M2M100ForConditionalGeneration"},
    tokenizer="roberta-bpe",
    activations=activations,
    tasks={"text2text-generation": "M2M100ForConditionalGeneration"},
)

__all__ = ["FAMILY", "M2M100Config"]
