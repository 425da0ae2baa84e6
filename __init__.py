"""shardzoo: a tensor-parallel model zoo.

Importing it is cheap; torch is loaded by the parts that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generation import generate
    from .models import from_config, from_pretrained

from .compat import spellings as _spellings  # noqa: F401  (makes arguments accept other systems' names)

__version__ = "0.2.0"
__all__ = ["__version__", "from_config", "from_pretrained", "generate"]


def __getattr__(name: str) -> Any:
    if name in ("from_config", "from_pretrained"):
        from . import models

        return getattr(models, name)
    if name == "generate":
        from .generation import generate

        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
