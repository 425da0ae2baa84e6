"""Training: arguments, processes, the loop, engines, checkpoints and what a person sees."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments.training_arguments import TrainingArguments
    from .trainer import Trainer

_MODULES = {"Trainer": "trainer", "TrainingArguments": "arguments.training_arguments"}
__all__ = ["Trainer", "TrainingArguments"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
