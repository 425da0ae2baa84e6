"""NLLB-MoE (NLLB Team, 2022): M2M100 with mixtures of experts."""

from ..family import Family, by_name
from .config import NllbMoeConfig
from .hf import NAME_MAP
from .memory import activations
from .model import NllbMoeForConditionalGeneration, NllbMoeModel
from .presets import PRESETS

FAMILY = Family(
    config=NllbMoeConfig,
    architectures=by_name(NllbMoeForConditionalGeneration, NllbMoeModel),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder-decoder",
    objective="bart",
    transformers_agrees=False,  # it takes the mask of the chosen experts for their numbers
    pretrains={"seq2seq": "NllbMoeForConditionalGeneration"},
    tokenizer="roberta-bpe",
    activations=activations,
    tasks={"text2text-generation": "NllbMoeForConditionalGeneration"},
)

__all__ = ["FAMILY", "NllbMoeConfig", "NllbMoeForConditionalGeneration", "NllbMoeModel"]
