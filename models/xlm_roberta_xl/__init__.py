"""XLM-RoBERTa-XL (Goyal et al., 2021): XLM-RoBERTa with pre-LayerNorm, in two large sizes."""

from ..family import Family, by_name
from .config import XLMRobertaXLConfig
from .hf import NAME_MAP
from .memory import activations
from .model import (
    XLMRobertaXLForCausalLM,
    XLMRobertaXLForMaskedLM,
    XLMRobertaXLForMultipleChoice,
    XLMRobertaXLForQuestionAnswering,
    XLMRobertaXLForSequenceClassification,
    XLMRobertaXLForTokenClassification,
    XLMRobertaXLModel,
)
from .presets import PRESETS

FAMILY = Family(
    config=XLMRobertaXLConfig,
    architectures=by_name(
        XLMRobertaXLModel,
        XLMRobertaXLForMaskedLM,
        XLMRobertaXLForCausalLM,
        XLMRobertaXLForSequenceClassification,
        XLMRobertaXLForTokenClassification,
        XLMRobertaXLForMultipleChoice,
        XLMRobertaXLForQuestionAnswering,
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "XLMRobertaXLForMaskedLM"},
    tokenizer="roberta-bpe",
    activations=activations,
)

__all__ = [
    "FAMILY",
    "XLMRobertaXLConfig",
    "XLMRobertaXLForCausalLM",
    "XLMRobertaXLForMaskedLM",
    "XLMRobertaXLForMultipleChoice",
    "XLMRobertaXLForQuestionAnswering",
    "XLMRobertaXLForSequenceClassification",
    "XLMRobertaXLForTokenClassification",
    "XLMRobertaXLModel",
]
