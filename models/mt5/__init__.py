"""mT5 (Xue et al., 2021, "mT5: A massively multilingual pre-trained text-to-text transformer"): T5 v1.1, untied."""

from ..registry import Family
from ..t5.hf import NAME_MAP
from ..t5.memory import activations
from ..t5.model import architectures
from .config import MT5Config
from .presets import PRESETS

FAMILY = Family(
    config=MT5Config,
    architectures=architectures("MT5"),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder-decoder",
    objective="t5",
    pretrains={"seq2seq": "MT5ForConditionalGeneration"},
    tokenizer="sentencepiece",
    activations=activations,
    tasks={"text2text-generation": "MT5ForConditionalGeneration"},
)

__all__ = ["FAMILY", "MT5Config"]
