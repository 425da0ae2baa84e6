"""Marian's translation models (Junczys-Dowmunt et al., 2018; OPUS-MT)."""

from ..bart.hf import WITHOUT_POSITIONS
from ..bart.memory import activations
from ..family import Family, by_name
from .config import MarianConfig
from .model import MarianEncoder, MarianForCausalLM, MarianModel, MarianMTModel
from .presets import PRESETS

FAMILY = Family(
    config=MarianConfig,
    architectures=by_name(MarianMTModel, MarianModel, MarianEncoder, MarianForCausalLM),
    presets=PRESETS,
    name_map=WITHOUT_POSITIONS,
    kind="encoder-decoder",
    objective="bart",
    pretrains={"seq2seq": "MarianMTModel"},
    tokenizer="roberta-bpe",
    activations=activations,
    tasks={"text2text-generation": "MarianMTModel"},
)

__all__ = [
    "FAMILY",
    "MarianConfig",
    "MarianEncoder",
    "MarianForCausalLM",
    "MarianMTModel",
    "MarianModel",
]
