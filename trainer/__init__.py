"""Trains models: one loop over several engines, with processes, checkpoints and logs.

Imports run downwards only. From the highest level to the lowest:

    trainer.py            the public class, which creates all parts of a run
    loop.py               the optimizer steps
    evaluation.py         validation
    checkpointing/  logging/  estimate/
    engines/              PyTorch, DDP and DeepSpeed; optimizers, schedules, precision
    batches/              micro-batches, and the normalization of the loss
    launch/               processes, ranks and hosts
    arguments/  run_folder.py

Folders and files on the same line do not import one another.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments.training_arguments import TrainingArguments
    from .launch.notebook import notebook_launcher
    from .trainer import Trainer

_MODULES = {
    "Trainer": "trainer",
    "TrainingArguments": "arguments.training_arguments",
    "notebook_launcher": "launch.notebook",
}
__all__ = ["Trainer", "TrainingArguments", "notebook_launcher"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
