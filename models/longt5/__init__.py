"""LongT5 (2021): T5 whose encoder attends within blocks, and perhaps to sums of blocks."""

from ..family import Family, by_name
from .config import LongT5Config
from .hf import NAME_MAP, name_map
from .memory import activations
from .model import LongT5EncoderModel, LongT5ForConditionalGeneration, LongT5Model
from .presets import PRESETS

FAMILY = Family(
    config=LongT5Config,
    architectures=by_name(LongT5ForConditionalGeneration, LongT5Model, LongT5EncoderModel),
    presets=PRESETS,
    name_map=NAME_MAP,
    name_map_of=name_map,
    kind="encoder-decoder",
    objective="t5",
    pretrains={"seq2seq": "LongT5ForConditionalGeneration"},
    tokenizer="sentencepiece",
    activations=activations,
    tasks={"text2text-generation": "LongT5ForConditionalGeneration"},
)

__all__ = [
    "FAMILY",
    "LongT5Config",
    "LongT5EncoderModel",
    "LongT5ForConditionalGeneration",
    "LongT5Model",
]
