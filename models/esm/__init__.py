"""ESM-1b and ESM-2 (Rives et al., 2021; Lin et al., 2023): encoders of proteins."""

from ..family import Family, by_name
from .config import EsmConfig
from .hf import NAME_MAP
from .memory import activations
from .model import EsmForMaskedLM, EsmForSequenceClassification, EsmForTokenClassification, EsmModel
from .presets import PRESETS

FAMILY = Family(
    config=EsmConfig,
    architectures=by_name(
        EsmForMaskedLM, EsmModel, EsmForSequenceClassification, EsmForTokenClassification
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "EsmForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
)

__all__ = [
    "FAMILY",
    "EsmConfig",
    "EsmForMaskedLM",
    "EsmForSequenceClassification",
    "EsmForTokenClassification",
    "EsmModel",
]
