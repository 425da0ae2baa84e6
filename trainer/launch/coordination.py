"""Ranks that agree: one does the work or finds the mistake, all of them learn the outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Runs `work` on rank 0 and gives its result, or raises its `ValueError` or `OSError`, on every rank.

    The result travels by pickle between the processes of this run.
    """
    if not dist.is_initialized():
        return work()
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
