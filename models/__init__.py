"""Model families, and the functions that build their models."""

from .auto import config_from_dict, find_config, from_config
from .loading import from_pretrained
from .parallel_config import ParallelConfig
from .registry import FAMILIES, Family, family, presets
from .saving import push_to_hub, save_pretrained

__all__ = [
    "FAMILIES",
    "Family",
    "ParallelConfig",
    "config_from_dict",
    "family",
    "find_config",
    "from_config",
    "from_pretrained",
    "presets",
    "push_to_hub",
    "save_pretrained",
]
