"""RoBERTa (Liu et al., 2019)."""

from ..bert.memory import activations
from ..family import Family, by_name
from .config import RobertaConfig
from .hf import NAME_MAP
from .model import (
    RobertaForCausalLM,
    RobertaForMaskedLM,
    RobertaForMultipleChoice,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=RobertaConfig,
    architectures=by_name(
        RobertaModel,
        RobertaForMaskedLM,
        RobertaForCausalLM,
        RobertaForSequenceClassification,
        RobertaForTokenClassification,
        RobertaForMultipleChoice,
        RobertaForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "RobertaForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
)

__all__ = [
    "FAMILY",
    "RobertaConfig",
    "RobertaForCausalLM",
    "RobertaForMaskedLM",
    "RobertaForMultipleChoice",
    "RobertaForQuestionAnswering",
    "RobertaForSequenceClassification",
    "RobertaForTokenClassification",
    "RobertaModel",
]
