"""ELECTRA (Clark et al., 2020)."""

from ..bert.memory import activations
from ..family import Family, by_name
from .config import ElectraConfig
from .hf import NAME_MAP
from .model import (
    ElectraForCausalLM,
    ElectraForMaskedLM,
    ElectraForMultipleChoice,
    ElectraForPreTraining,
    ElectraForQuestionAnswering,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
    ElectraModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=ElectraConfig,
    architectures=by_name(
        ElectraModel,
        ElectraForMaskedLM,
        ElectraForCausalLM,
        ElectraForPreTraining,
        ElectraForSequenceClassification,
        ElectraForTokenClassification,
        ElectraForQuestionAnswering,
        ElectraForMultipleChoice,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "ElectraForMaskedLM"},
    tokenizer="wordpiece",
    activations=activations,
)

__all__ = [
    "FAMILY",
    "ElectraConfig",
    "ElectraForCausalLM",
    "ElectraForMaskedLM",
    "ElectraForMultipleChoice",
    "ElectraForPreTraining",
    "ElectraForQuestionAnswering",
    "ElectraForSequenceClassification",
    "ElectraForTokenClassification",
    "ElectraModel",
]
