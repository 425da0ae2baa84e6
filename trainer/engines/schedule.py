"""Sets learning rates: by the schedules of `schedules.py`, or by torch's schedulers."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..arguments.training_arguments import TrainingArguments
from ..schedules import SCHEDULES, Multiplier
from .state import apply_changes, json_changes, to_json


class LearningRate(Protocol):
    """Sets the learning rates of an optimizer."""

    def before_step(self, step: int) -> None:
        """Is called before the step that follows `step` steps."""
        ...

    def after_step(self) -> None: ...

    def next_rates(self, step: int) -> list[float | None]:
        """Returns the rate of each parameter group in the step that follows `step` steps; None for
        a group whose optimizer finds its own.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NamedSchedule:
    """Multiplies each group's initial rate by a function of the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, multiplier: Multiplier) -> None:
        self._multiplier = multiplier
        self._groups = [(group, group.get("lr")) for group in optimizer.param_groups]

    def before_step(self, step: int) -> None:
        multiple = self._multiplier(step)
        for group, initial in self._groups:
            if initial is not None:
                group["lr"] = initial * multiple

    def after_step(self) -> None:
        pass

    def next_rates(self, step: int) -> list[float | None]:
        multiple = self._multiplier(step)
        return [
            None if initial is None else float(initial * multiple) for _, initial in self._groups
        ]

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

    def next_rates(self, step: int) -> list[float | None]:
        return [float(group["lr"]) for group in self._scheduler.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the values that have changed since the scheduler was created.

        The others are the user's choice.
        """
        return json_changes(self._first, to_json(self._scheduler.state_dict()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict`.

        Raises ValueError if the run was saved without an lr_scheduler.
        """
        if not state:
            raise ValueError(
                "the run was trained without an lr_scheduler, and cannot resume with one; leave "
                "lr_scheduler out"
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
    schedule = SCHEDULES[arguments.lr_schedule]
    warmup_steps = arguments.warmup_steps
    if total_steps is None:
        warms_up_by_ratio = (
            schedule.warms_up and warmup_steps is None and arguments.warmup_ratio > 0
        )
        if schedule.needs_last_step or warms_up_by_ratio:
            raise ValueError(
                f"lr_schedule={schedule.name!r} needs to know the last step, and the length of the "
                "data is unknown; set train_steps, or use lr_schedule='constant_with_warmup' with "
                "warmup_steps"
            )
        total_steps = 0
    if warmup_steps is None:
        warmup_steps = math.ceil(arguments.warmup_ratio * total_steps)
    return NamedSchedule(optimizer, schedule.multiplier(warmup_steps, total_steps))


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an object that the training loop cannot step, or another optimizer's
    scheduler.
    """
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "lr_scheduler must be a torch.optim.lr_scheduler.LRScheduler whose rate depends on the "
            f"step alone, not {scheduler!r}"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            "lr_scheduler belongs to another optimizer than the one in use: pass its optimizer too"
        )
