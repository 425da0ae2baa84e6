"""Describes the position of this process among the ranks of a run, and provides the trainer's
collectives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...mpu import ParallelMesh
from ...mpu.collectives import gather_bytes
from ...mpu.mesh import REPLICA_AXES, SAMPLE_AXES
from .phase import RANK_0, phase

# Rank 0 may prepare a corpus or build kernels for as long as it takes.
PATIENCE = timedelta(days=365)


class Ranks:
    """A position in a mesh, or one process (`mesh=None`): the ranks and sizes of the axes, and sums
    over them.

    Data-parallel ranks (`dp_rank`, `dp_size`) read different samples; those of the expert axis
    (`ep_size`) are among them. Replicas (`replica_rank`,
    `replica_size`) hold the same parameters, so their gradients are summed: they are the
    data-parallel ranks times the context-parallel ones, which read parts of the same samples.
    """

    def __init__(self, mesh: ParallelMesh | None) -> None:
        self.mesh = mesh
        self.rank = 0
        self.world_size = 1
        self.dp_rank = 0
        self.dp_size = 1
        self.cp_rank = 0
        self.cp_size = 1
        self.ep_size = 1
        self.replica_rank = 0
        self.replica_size = 1
        self.tp_rank = 0
        self.tp_size = 1
        self.pp_rank = 0
        self.pp_size = 1
        if mesh is not None:
            self.rank = mesh.rank
            self.world_size = mesh.world_size
            self.dp_rank = mesh.rank_in(*SAMPLE_AXES)
            self.dp_size = mesh.size(*SAMPLE_AXES)
            self.ep_size = mesh.size("expert")
            self.cp_rank = mesh.cp_rank
            self.cp_size = mesh.cp_size
            self.replica_rank = mesh.rank_in(*REPLICA_AXES)
            self.replica_size = mesh.size(*REPLICA_AXES)
            self.tp_rank = mesh.tp_rank
            self.tp_size = mesh.tp_size
            self.pp_rank = mesh.pp_rank
            self.pp_size = mesh.pp_size
        self.reports = self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == self.pp_size - 1
        """Whether this rank's results count for its samples: the first tensor-parallel and
        context-parallel rank of the last stage.
        """

    def sum_replicas(self, *values: float) -> list[float]:
        """Returns sums over the data-parallel ranks, in fp64.

        Of each replica, the rank that `reports` counts.
        """
        if not self.reports:
            values = tuple(0.0 for _ in values)
        return self.sum(*values)

    def sum(self, *values: float) -> list[float]:
        """Returns sums over all processes, in fp64."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        group = None
        if dist.get_backend() == "nccl":
            # It supports only GPU tensors, and its result would come after all work that waits on
            # the GPU.
            group = _find_patient_group()
        dist.all_reduce(total, group=group)
        return total.tolist()

    def sum_on_device(self, values: Tensor) -> Tensor:
        """Adds a tensor up over all processes in place, and returns it.

        On GPUs the host does not wait for the sum.
        """
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Returns the values of the processes of a group, by default of all, by rank.

        See `to_json` for the values.
        """
        if self.world_size == 1:
            return [value]
        return [from_json(text) for text in gather_bytes(to_json(value), group)]


Result = TypeVar("Result")


@phase(RANK_0)
def on_first_rank(work: Callable[[], Result]) -> Result:
    """Runs `work` on rank 0; returns its result, or raises its `ValueError` or `OSError`, on every
    rank.

    The other ranks wait for as long as `work` takes. See `to_json` for the possible results.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    group = _find_patient_group()
    result = None
    if dist.get_rank() == 0:
        try:
            result = work()
        except (ValueError, OSError) as error:
            _broadcast([None, error], group)
            raise
    value, error = _broadcast([result, None], group)
    if error is not None:
        raise error
    return value


# At most one entry: the default process group, and a group of the same ranks that waits for long.
_patient: list[tuple[Any, Any]] = []


def _find_patient_group() -> Any:
    """Returns a group of all ranks whose collectives wait for rank 0's work.

    It still fails as soon as a rank ends.
    """
    world = dist.group.WORLD
    if not _patient or _patient[0][0] is not world:
        _patient[:] = [(world, dist.new_group(backend="gloo", timeout=PATIENCE))]
    return _patient[0][1]


def _broadcast(value: Any, group: Any) -> Any:
    """Returns rank 0's value on every rank."""
    if dist.get_rank() == 0:
        text = bytearray(to_json(value))
        dist.broadcast(torch.tensor([len(text)]), src=0, group=group)
        dist.broadcast(torch.tensor(text, dtype=torch.uint8), src=0, group=group)
        return value
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, src=0, group=group)
    content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, src=0, group=group)
    return from_json(bytes(content.tolist()))


def to_json(value: Any) -> bytes:
    """Returns JSON of None, truth values, numbers, texts, paths, and lists, tuples, dicts and
    errors of such values.

    Raises TypeError for another value.
    """
    return json.dumps(_plain(value)).encode()


def from_json(text: bytes) -> Any:
    return _restored(json.loads(text))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(entry) for entry in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(entry)] for key, entry in value.items()]}
    if isinstance(value, PurePath):
        return {"path": [str(value)]}
    if isinstance(value, OSError) and value.errno is not None:
        return {"OSError": [value.errno, value.strerror, value.filename and str(value.filename)]}
    if isinstance(value, OSError):
        return {"OSError": [str(value)]}
    if isinstance(value, ValueError):
        return {"ValueError": [str(value)]}
    raise TypeError(f"a {type(value).__name__} cannot be sent between ranks")


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return RESTORE[kind](content)


RESTORE: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": lambda entries: tuple(map(_restored, entries)),
    "dict": lambda pairs: {_restored(key): _restored(entry) for key, entry in pairs},
    "path": lambda parts: Path(*parts),
    "OSError": lambda parts: OSError(*parts),
    "ValueError": lambda parts: ValueError(*parts),
}
