"""UMT5 (Chung et al., 2023, arXiv:2304.09151): mT5 with a relative bias of its own in every layer."""

from ..family import Family, by_name
from ..t5.hf import name_map
from ..t5.memory import activations
from .config import UMT5Config
from .gguf import GGUF
from .model import (
    UMT5EncoderModel,
    UMT5ForConditionalGeneration,
    UMT5ForQuestionAnswering,
    UMT5ForSequenceClassification,
    UMT5ForTokenClassification,
    UMT5Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=UMT5Config,
    architectures=by_name(
        UMT5ForConditionalGeneration,
        UMT5Model,
        UMT5ForSequenceClassification,
        UMT5ForQuestionAnswering,
        UMT5EncoderModel,
        UMT5ForTokenClassification,
    ),
    presets=PRESETS,
    name_map=name_map(shares_bias=False),
    kind="encoder-decoder",
    objective="t5",
    pretrains={"seq2seq": "UMT5ForConditionalGeneration"},
    tokenizer="unigram",
    activations=activations,
    gguf=GGUF,
    tasks={"text2text-generation": "UMT5ForConditionalGeneration"},
    # The published files have no model_type.
    has_config=lambda values: str(values.get("architectures")).startswith("['UMT5"),
)

__all__ = [
    "FAMILY",
    "UMT5Config",
    "UMT5EncoderModel",
    "UMT5ForConditionalGeneration",
    "UMT5ForQuestionAnswering",
    "UMT5ForSequenceClassification",
    "UMT5ForTokenClassification",
    "UMT5Model",
]
