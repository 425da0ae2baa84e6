"""The model families."""

from .auto import FAMILIES, config_from_dict, family, find_config, from_config
from .common.execution import Execution

__all__ = ["FAMILIES", "Execution", "config_from_dict", "family", "find_config", "from_config"]
