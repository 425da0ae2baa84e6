"""CamemBERT (Martin et al., 2019): RoBERTa with a French vocabulary."""

from ..roberta.siblings import sibling
from .config import CamembertConfig
from .presets import PRESETS

FAMILY = sibling("Camembert", CamembertConfig, PRESETS)

__all__ = ["FAMILY", "CamembertConfig"]
