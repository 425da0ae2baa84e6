"""Trains models: one loop over several engines, with processes, checkpoints and logs.

Imports run downwards only. From the highest level to the lowest:

    trainer.py        the public class, which creates all parts of a run
    loop.py           the steps of a run, and evaluations, logs and checkpoints between them
    step.py           one optimizer step, from top to bottom
    evaluation.py     the loss and the metrics of validation data
    batches/          micro-batches, and the normalization of the loss
    checkpointing/    what a run saves, and resumes from
    run_folder.py     the files of a run; run_lock.py: one run at a time in a folder
    estimate/         the memory of a run, without running it
    logging/          progress, values, trackers, reports
    engines/          PyTorch, DDP, DeepSpeed and its pipelines, each a file
    lora.py           LoRA weights, as the arguments ask for them
    launch/           processes, ranks, signals and hosts
    arguments/        the dataclass of a run's arguments, and DeepSpeed's file
    optimizers/       registry.py lists them; those that the trainer computes itself
    environments.py, schedules.py, precisions.py
                      what else the arguments may name

`tests/test_structure.py` finds circles among them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments.training_arguments import TrainingArguments
    from .engines.factory import gather_parameters
    from .launch.notebook import notebook_launcher
    from .trainer import Trainer

_MODULES = {
    "Trainer": "trainer",
    "TrainingArguments": "arguments.training_arguments",
    "gather_parameters": "engines.factory",
    "notebook_launcher": "launch.notebook",
}
__all__ = ["Trainer", "TrainingArguments", "gather_parameters", "notebook_launcher"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
