"""T5 (Raffel et al., 2020), versions 1.0 and 1.1."""

from ..registry import Family
from .config import T5Config
from .hf import NAME_MAP
from .memory import activations
from .model import architectures
from .presets import PRESETS

FAMILY = Family(
    config=T5Config,
    architectures=architectures("T5"),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder-decoder",
    objective="t5",
    pretrains={"seq2seq": "T5ForConditionalGeneration"},
    tokenizer="sentencepiece",
    tokenizers={"ByT5Tokenizer": "bytes"},
    activations=activations,
    tasks={"text2text-generation": "T5ForConditionalGeneration"},
)

__all__ = ["FAMILY", "T5Config"]
