"""BERT (Devlin et al., 2018)."""

from ..registry import Family
from .config import BertConfig
from .hf import NAME_MAP
from .megatron import MEGATRON
from .memory import activations
from .model import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from .presets import PRESETS

FAMILY = Family(
    config=BertConfig,
    architectures={
        "BertForMaskedLM": BertForMaskedLM,
        "BertForPreTraining": BertForPreTraining,
        "BertForSequenceClassification": BertForSequenceClassification,
    },
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder",
    objective="bert-nsp",
    pretrains={"masked": "BertForMaskedLM", "sentence-pairs": "BertForPreTraining"},
    tokenizer="wordpiece",
    activations=activations,
    megatron=MEGATRON,
    tasks={"text-classification": "BertForSequenceClassification"},
    new_modules=("pooler", "next_sentence", "classifier"),
)

__all__ = ["FAMILY", "BertConfig", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"]
