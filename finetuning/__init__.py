"""Fine-tunes models of the zoo and of transformers on texts, with the API of t2t-tuner.

    from shardzoo import finetuning as t2t

    trainer_arguments = t2t.TrainerArguments(model_name_or_path="t5-small", train_file="pairs.json")
    trainer = t2t.Trainer(arguments=trainer_arguments)
    trainer.train(valid=False)

Each name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import FinetuningArguments
    from .arguments import FinetuningArguments as TrainerArguments
    from .freezing import ModelSummary
    from .trainer import Trainer

# Name -> (module, name in it). TrainerArguments is t2t-tuner's name.
_NAMES = {
    "FinetuningArguments": ("arguments", "FinetuningArguments"),
    "ModelSummary": ("freezing", "ModelSummary"),
    "Trainer": ("trainer", "Trainer"),
    "TrainerArguments": ("arguments", "FinetuningArguments"),
}
__all__ = ["FinetuningArguments", "ModelSummary", "Trainer", "TrainerArguments"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NAMES[name]
    return getattr(import_module(f".{module}", __name__), attribute)
