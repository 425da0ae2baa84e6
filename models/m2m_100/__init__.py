"""M2M100 (Fan et al., 2020) and NLLB (NLLB Team, 2022)."""

from ..bart.hf import NAME_MAP
from ..bart.memory import activations
from ..family import Family, by_name
from .config import M2M100Config
from .model import M2M100Encoder, M2M100ForConditionalGeneration, M2M100Model
from .presets import PRESETS

FAMILY = Family(
    config=M2M100Config,
    architectures=by_name(M2M100ForConditionalGeneration, M2M100Model, M2M100Encoder),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder-decoder",
    objective="bart",
    pretrains={"seq2seq": "M2M100ForConditionalGeneration"},
    tokenizer="roberta-bpe",
    activations=activations,
    tasks={"text2text-generation": "M2M100ForConditionalGeneration"},
)

__all__ = [
    "FAMILY",
    "M2M100Config",
    "M2M100Encoder",
    "M2M100ForConditionalGeneration",
    "M2M100Model",
]
