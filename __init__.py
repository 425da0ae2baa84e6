"""shardzoo: a tensor-parallel model zoo. Importing it is cheap; torch is loaded by the parts that need it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models import from_config, from_pretrained

__version__ = "0.1.0"
__all__ = ["__version__", "from_config", "from_pretrained"]


def __getattr__(name: str) -> Any:
    if name in ("from_config", "from_pretrained"):
        from . import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
