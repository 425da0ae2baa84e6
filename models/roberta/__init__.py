"""RoBERTa (Liu et al., 2019)."""

from ..bert.memory import activations
from ..registry import Family
from .config import RobertaConfig
from .hf import NAME_MAP
from .model import RobertaForMaskedLM, RobertaForSequenceClassification
from .presets import PRESETS

FAMILY = Family(
    config=RobertaConfig,
    architectures={
        "RobertaForMaskedLM": RobertaForMaskedLM,
        "RobertaForSequenceClassification": RobertaForSequenceClassification,
    },
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "RobertaForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
    tasks={"text-classification": "RobertaForSequenceClassification"},
    new_modules=("pooler", "classifier"),
)

__all__ = ["FAMILY", "RobertaConfig", "RobertaForMaskedLM", "RobertaForSequenceClassification"]
