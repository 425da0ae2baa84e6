"""Fine-tuning models of the zoo and of transformers on texts, with the calls of t2t-tuner.

    from shardzoo import finetuning as t2t

    trainer_arguments = t2t.TrainerArguments(model_name_or_path="t5-small", train_file="pairs.json")
    trainer = t2t.Trainer(arguments=trainer_arguments)
    trainer.train(valid=False)

Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import TrainerArguments
    from .freezing import ModelSummary
    from .recipe import Trainer

_MODULES = {"ModelSummary": "freezing", "Trainer": "recipe", "TrainerArguments": "arguments"}
__all__ = ["ModelSummary", "Trainer", "TrainerArguments"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
