"""XLM-RoBERTa (Conneau et al., 2019): RoBERTa with a multilingual vocabulary."""

from ..roberta.siblings import sibling
from .config import XLMRobertaConfig
from .presets import PRESETS

FAMILY = sibling("XLMRoberta", XLMRobertaConfig, PRESETS)

__all__ = ["FAMILY", "XLMRobertaConfig"]
