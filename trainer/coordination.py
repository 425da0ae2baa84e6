"""Ranks that agree: one does the work or finds the mistake, all of them learn the outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
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


def sum_over(group: dist.ProcessGroup | None, *values: float) -> list[float]:
    """The sums over a group's ranks, in fp64."""
    total = torch.tensor(values, dtype=torch.float64)
    if group is not None and dist.get_world_size(group) > 1:
        # NCCL moves only GPU tensors.
        total = total.cuda() if dist.get_backend(group) == "nccl" else total
        dist.all_reduce(total, group=group)
    return total.tolist()
