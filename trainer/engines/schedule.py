"""Sets learning rates: by named schedules, which are functions of the step, and by torch's schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..arguments.training_arguments import TrainingArguments
from .state import apply_changes, json_changes, to_json

Multiplier = Callable[[int], float]
OPEN_ENDED = ("constant", "constant_with_warmup", "inverse_sqrt")


class LearningRate(Protocol):
    """Sets the learning rates of an optimizer."""

    def before_step(self, step: int) -> None: ...
    def after_step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NamedSchedule:
    """Multiplies each group's initial rate by a function of the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, multiplier: Multiplier) -> None:
        self._multiplier = multiplier
        self._groups = [
            (group, group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None
        ]

    def before_step(self, step: int) -> None:
        multiple = self._multiplier(step)
        for group, initial in self._groups:
            group["lr"] = initial * multiple

    def after_step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class TorchSchedule:
    """A torch scheduler, stepped after each optimizer step."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self._first = to_json(scheduler.state_dict())

    def before_step(self, step: int) -> None:
        pass

    def after_step(self) -> None:
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the values that have changed since the scheduler was created. The others are the user's choice."""
        return json_changes(self._first, to_json(self._scheduler.state_dict()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict`. Raises ValueError if the run was saved without an lr_scheduler."""
        if not state:
            raise ValueError(
                "the run was trained without an lr_scheduler, and cannot resume with one; leave lr_scheduler out"
            )
        self._scheduler.load_state_dict(apply_changes(self._scheduler.state_dict(), state))


def make_schedule(
    scheduler: LRScheduler | None,
    optimizer: torch.optim.Optimizer,
    arguments: TrainingArguments,
    total_steps: int | None,
) -> LearningRate:
    """Returns the given scheduler, or the schedule that `arguments` name.

    Raises ValueError if the scheduler cannot be used, or the schedule needs to know the last step.
    """
    if scheduler is not None:
        check_scheduler(scheduler, optimizer)
        return TorchSchedule(scheduler)
    if total_steps is None:
        warms_up = (
            arguments.lr_schedule != "constant"
            and arguments.warmup_steps is None
            and arguments.warmup_ratio
        )
        if arguments.lr_schedule not in OPEN_ENDED or warms_up:
            raise ValueError(
                f"lr_schedule={arguments.lr_schedule!r} needs to know the last step, and the length of the data is "
                f"unknown; set train_steps, or use lr_schedule='constant_with_warmup' with warmup_steps"
            )
        total_steps = 0
    warmup_steps = arguments.warmup_steps
    if warmup_steps is None:
        warmup_steps = math.ceil(arguments.warmup_ratio * total_steps)
    return NamedSchedule(
        optimizer, find_multiplier(arguments.lr_schedule, warmup_steps, total_steps)
    )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an object that the training loop cannot step, or another optimizer's scheduler."""
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "lr_scheduler must be a torch.optim.lr_scheduler.LRScheduler whose rate depends on the step alone, not "
            f"{scheduler!r}"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            "lr_scheduler belongs to another optimizer than the one in use: pass its optimizer too"
        )


def find_multiplier(name: str, warmup_steps: int, total_steps: int) -> Multiplier:
    """Returns a schedule by name, as a function of the step: our own, or one of transformers."""
    if name == "warmup_cosine":
        return lambda step: warmup_cosine(
            step, peak=1.0, warmup_steps=warmup_steps, total_steps=total_steps
        )
    from transformers.optimization import get_scheduler

    shape: Any = get_scheduler(
        name,
        torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0),
        num_warmup_steps=warmup_steps,
        num_training_steps=total_steps,
    )
    return shape.lr_lambdas[0]


def warmup_cosine(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, final_ratio: float = 0.1
) -> float:
    """Returns the learning rate: a linear warm-up to `peak`, then a cosine down to `final_ratio * peak`.

    Steps count from 0. Step 0 already has a rate above zero, and step `total_steps - 1` has the lowest one.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return peak * (final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
