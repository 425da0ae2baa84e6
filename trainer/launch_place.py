"""This process's place among a run's, from the variables of whoever started it. Needs no torch: starting is quick."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from .launch_slurm import started_by_srun, torch_variables


@dataclass(frozen=True)
class Launch:
    """This process's place in the run, from the variables that torchrun, deepspeed, srun and our own start set.

    variables: torchrun's for this place, where the starter has set others.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        own = {} if "RANK" in environ or not started_by_srun(environ) else torch_variables(environ)
        found = {**environ, **own}
        world_size = int(found.get("WORLD_SIZE", 1))
        return cls(
            rank=int(found.get("RANK", 0)),
            world_size=world_size,
            local_rank=int(found.get("LOCAL_RANK", 0)),
            local_world_size=int(found.get("LOCAL_WORLD_SIZE", found.get("LOCAL_SIZE", world_size))),
            variables=own,
        )

    def export(self) -> None:
        """Sets the variables that `torch.distributed` and DeepSpeed read."""
        os.environ.update(self.variables)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_environment(local_world_size: int) -> dict[str, str]:
    """Variables that make several CPU processes of one machine fast; those already set are kept.

    Huge pages for tensors: touching fresh small pages costs eager PyTorch most of its memory bandwidth.
    LOCAL_SIZE: how many devices DeepSpeed's CPU accelerator may count on, one for each process.
    """
    threads = max(1, (os.cpu_count() or 1) // local_world_size)
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "THP_MEM_ALLOC_ENABLE": "1",
        "LOCAL_SIZE": str(local_world_size),
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
