"""The processes of a run: this one's place among them, and joining the others."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from .launch_rank import join_job
from .launch_slurm import started_by_srun, torch_variables

if not torch.accelerator.is_available():
    # Read when DeepSpeed is imported; it would warn on every rank that it had found no other.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

PROCESS_GROUP_TIMEOUT = timedelta(minutes=30)  # preparing a corpus on the first rank may take a while


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


def initialize_distributed(launch: Launch) -> torch.device:
    """Joins the process group (NCCL with GPUs, else gloo) and returns this process's device."""
    launch.export()
    join_job()
    if not dist.is_initialized():
        if launch.world_size == 1:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(free_port()))
            os.environ.setdefault("RANK", "0")
            os.environ.setdefault("WORLD_SIZE", "1")
            os.environ.setdefault("LOCAL_RANK", "0")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=PROCESS_GROUP_TIMEOUT)
        atexit.register(leave_distributed)
    if torch.cuda.is_available():
        index = launch.local_rank % torch.cuda.device_count()  # srun may show each task its own GPU alone
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    torch.set_num_threads(int(cpu_environment(launch.local_world_size)["OMP_NUM_THREADS"]))
    return torch.device("cpu")


def end_process(code: int) -> NoReturn:
    """Ends a rank at once, its output written: threads of the process group could abort an orderly end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_distributed() -> None:
    """Ends the process group, if there is one: its threads would abort the interpreter's end."""
    if dist.is_initialized():
        dist.destroy_process_group()
