"""Switch Transformers (Fedus et al., 2021): T5 with mixtures of experts."""

from ..family import Family, by_name
from .config import SwitchTransformersConfig
from .hf import NAME_MAP
from .memory import activations
from .model import (
    SwitchTransformersEncoderModel,
    SwitchTransformersForConditionalGeneration,
    SwitchTransformersModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=SwitchTransformersConfig,
    architectures=by_name(
        SwitchTransformersForConditionalGeneration,
        SwitchTransformersModel,
        SwitchTransformersEncoderModel,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder-decoder",
    objective="t5",
    pretrains={"seq2seq": "SwitchTransformersForConditionalGeneration"},
    tokenizer="sentencepiece",
    activations=activations,
    tasks={"text2text-generation": "SwitchTransformersForConditionalGeneration"},
)

__all__ = [
    "FAMILY",
    "SwitchTransformersConfig",
    "SwitchTransformersEncoderModel",
    "SwitchTransformersForConditionalGeneration",
    "SwitchTransformersModel",
]
