"""mT5 (Xue et al., 2021): T5 v1.1 with a vocabulary for 101 languages."""

from ..registry import Family
from ..t5.hf import NAME_MAP
from ..t5.memory import activations
from .config import MT5Config
from .model import MT5ForConditionalGeneration
from .presets import PRESETS

FAMILY = Family(
    config=MT5Config,
    architectures={"MT5ForConditionalGeneration": MT5ForConditionalGeneration},
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder-decoder",
    objective="t5",
    pretrains={"seq2seq": "MT5ForConditionalGeneration"},
    tokenizer="sentencepiece",
    activations=activations,
    tasks={"text2text-generation": "MT5ForConditionalGeneration"},
)

__all__ = ["FAMILY", "MT5Config", "MT5ForConditionalGeneration"]
