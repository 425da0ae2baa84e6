"""Pegasus (Zhang et al., 2020), which summarizes texts."""

from ..bart.hf import WITHOUT_POSITIONS
from ..bart.memory import activations
from ..family import Family, by_name
from .config import PegasusConfig
from .model import PegasusEncoder, PegasusForCausalLM, PegasusForConditionalGeneration, PegasusModel
from .presets import PRESETS

FAMILY = Family(
    config=PegasusConfig,
    architectures=by_name(
        PegasusForConditionalGeneration, PegasusModel, PegasusEncoder, PegasusForCausalLM
    ),
    presets=PRESETS,
    name_map=WITHOUT_POSITIONS,
    kind="encoder-decoder",
    objective="bart",
    pretrains={"seq2seq": "PegasusForConditionalGeneration"},
    tokenizer="roberta-bpe",
    activations=activations,
    tasks={"text2text-generation": "PegasusForConditionalGeneration"},
)

__all__ = [
    "FAMILY",
    "PegasusConfig",
    "PegasusEncoder",
    "PegasusForCausalLM",
    "PegasusForConditionalGeneration",
    "PegasusModel",
]
