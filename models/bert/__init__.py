"""BERT (Devlin et al., 2018)."""

from ..heads import with_heads
from ..registry import Family
from .config import BertConfig
from .hf import NAME_MAP
from .megatron import MEGATRON
from .memory import activations
from .model import HEADS, BertBody
from .presets import PRESETS

FAMILY = Family(
    config=BertConfig,
    architectures=with_heads(BertBody, "Bert", HEADS),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder",
    objective="bert-nsp",
    pretrains={"masked": "BertForMaskedLM", "sentence-pairs": "BertForPreTraining"},
    tokenizer="wordpiece",
    activations=activations,
    megatron=MEGATRON,
)

__all__ = ["FAMILY", "BertConfig"]
