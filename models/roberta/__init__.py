"""RoBERTa (Liu et al., 2019)."""

from ..bert.memory import activations
from ..bert.model import BertBody
from ..heads import with_heads
from ..registry import Family
from .config import RobertaConfig
from .hf import NAME_MAP
from .model import HEADS
from .presets import PRESETS

FAMILY = Family(
    config=RobertaConfig,
    architectures=with_heads(BertBody, "Roberta", HEADS),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "RobertaForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
)

__all__ = ["FAMILY", "RobertaConfig"]
