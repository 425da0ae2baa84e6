"""Describes the position of this process among the ranks of a run, and provides the trainer's collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...mpu import ParallelMesh


class Ranks:
    """A position in a mesh, or one process (`mesh=None`): the ranks and sizes of the axes, and sums over them."""

    def __init__(self, mesh: ParallelMesh | None) -> None:
        self.mesh = mesh
        self.rank, self.world_size = (mesh.rank, mesh.world_size) if mesh else (0, 1)
        self.dp_rank, self.dp_size = (mesh.dp_rank, mesh.dp_size) if mesh else (0, 1)
        self.tp_rank, self.tp_size = (mesh.tp_rank, mesh.tp_size) if mesh else (0, 1)
        self.pp_rank, self.pp_size = (mesh.pp_rank, mesh.pp_size) if mesh else (0, 1)
        self.reports = self.tp_rank == 0 and self.pp_rank == self.pp_size - 1
        """Whether this rank's results count for its replica: the first tensor-parallel rank of the last stage."""

    def sum_replicas(self, *values: float) -> list[float]:
        """Returns sums over the data-parallel ranks, in fp64. Of each replica, the rank that `reports` counts."""
        return self.sum(*(value if self.reports else 0.0 for value in values))

    def sum(self, *values: float) -> list[float]:
        """Returns sums over all processes, in fp64."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        total = total.cuda() if dist.get_backend() == "nccl" else total  # NCCL supports only GPU tensors
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Returns the values of all processes, by rank. They are pickled between the processes of this run."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=group)
        return values


Result = TypeVar("Result")


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Runs `work` on rank 0; returns its result, or raises its `ValueError` or `OSError`, on every rank.

    The result is pickled between the processes of this run.
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
