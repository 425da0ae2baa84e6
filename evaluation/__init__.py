"""Evaluates models with lm-evaluation-harness, under tensor parallelism."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .harness import ShardzooLM, leading, simple_evaluate

__all__ = ["ShardzooLM", "leading", "simple_evaluate"]


def missing_packages() -> str:
    """Returns what to install before models can be evaluated; empty if nothing is missing."""
    missing = [name for name in ("lm_eval", "accelerate") if find_spec(name) is None]
    if not missing:
        return ""
    return (
        f"lm-evaluation-harness needs the packages {' and '.join(missing)}: "
        "install them by `pip install 'shardzoo[lm-eval]'`"
    )


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    missing = missing_packages()
    if missing:
        raise ImportError(missing)
    return getattr(import_module(".harness", __name__), name)
