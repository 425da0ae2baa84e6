"""Lists the schedules of the learning rate, as functions of the step.

Importing this file does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

Multiplier = Callable[[int], float]
"""The number of steps before this one -> the factor of the peak learning rate."""


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule of the learning rate.

    Attributes:
        name: Its name in the arguments.
        needs_last_step: Whether its values depend on the number of steps of the run.
        warms_up: Whether it begins with a warm-up.
        deepspeed_types: DeepSpeed's names for it, in lower case.
        build: Makes it from the numbers of warm-up steps and of all steps. None for transformers'
            schedule of the name.
    """

    name: str
    needs_last_step: bool = True
    warms_up: bool = True
    deepspeed_types: tuple[str, ...] = ()
    build: Callable[[int, int], Multiplier] | None = None

    def multiplier(self, warmup_steps: int, total_steps: int) -> Multiplier:
        """Returns the schedule of a run as a function of the step."""
        if self.build is not None:
            return self.build(warmup_steps, total_steps)
        return _build_schedule_of_transformers(self.name, warmup_steps, total_steps)


def _build_schedule_of_transformers(name: str, warmup_steps: int, total_steps: int) -> Multiplier:
    import torch
    from torch import nn
    from transformers.optimization import get_scheduler

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler: Any = get_scheduler(
        name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps
    )
    return scheduler.lr_lambdas[0]


def _build_warmup_cosine(warmup_steps: int, total_steps: int) -> Multiplier:
    return lambda step: warmup_cosine(
        step, peak=1.0, warmup_steps=warmup_steps, total_steps=total_steps
    )


def warmup_cosine(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, final_ratio: float = 0.1
) -> float:
    """Returns the learning rate: a linear warm-up to `peak`, then a cosine down to `final_ratio *
    peak`.

    Steps count from 0. Step 0 already has a rate above zero, and step `total_steps - 1` has the
    lowest one.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return peak * (final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        ScheduleEntry("warmup_cosine", build=_build_warmup_cosine),
        ScheduleEntry("cosine", deepspeed_types=("warmupcosinelr",)),
        ScheduleEntry("linear", deepspeed_types=("warmupdecaylr",)),
        ScheduleEntry("constant", needs_last_step=False, warms_up=False),
        ScheduleEntry("constant_with_warmup", needs_last_step=False, deepspeed_types=("warmuplr",)),
        ScheduleEntry("inverse_sqrt", needs_last_step=False),
        ScheduleEntry("polynomial"),
        ScheduleEntry("cosine_with_restarts"),
    )
}

if TYPE_CHECKING:
    ScheduleName = str
else:
    # For the command line and its help, and for the checks of values.
    ScheduleName = Literal[tuple(SCHEDULES)]
