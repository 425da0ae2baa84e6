"""BERT (Devlin et al., 2018)."""

from .config import BertConfig
from .hf import NAME_MAP
from .model import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from .presets import PRESETS

Config = BertConfig
Model = BertForMaskedLM
MODELS = {model.__name__: model for model in (BertForMaskedLM, BertForPreTraining, BertForSequenceClassification)}

__all__ = [
    "MODELS",
    "NAME_MAP",
    "PRESETS",
    "BertConfig",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForSequenceClassification",
    "Config",
    "Model",
]
