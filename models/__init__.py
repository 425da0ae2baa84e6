"""The model families."""

from .auto import FAMILIES, config_from_dict, family, find_config, from_config, presets
from .common.parallel_config import ParallelConfig
from .loading import from_pretrained

__all__ = [
    "FAMILIES",
    "ParallelConfig",
    "config_from_dict",
    "family",
    "find_config",
    "from_config",
    "from_pretrained",
    "presets",
]
