"""The model families."""

from .auto import FAMILIES, config_from_dict, family, find_config, from_config, presets
from .common.execution import Execution
from .loading import from_pretrained

__all__ = [
    "FAMILIES",
    "Execution",
    "config_from_dict",
    "family",
    "find_config",
    "from_config",
    "from_pretrained",
    "presets",
]
