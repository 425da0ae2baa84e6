"""RoBERTa (Liu et al., 2019)."""

from .config import RobertaConfig
from .hf import NAME_MAP
from .model import RobertaForMaskedLM, RobertaForSequenceClassification
from .presets import PRESETS

Config = RobertaConfig
Model = RobertaForMaskedLM
MODELS = {model.__name__: model for model in (RobertaForMaskedLM, RobertaForSequenceClassification)}

__all__ = [
    "MODELS",
    "NAME_MAP",
    "PRESETS",
    "Config",
    "Model",
    "RobertaConfig",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
]
