"""The processes of a run: who started them, how many, and starting the ones that are missing."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .arguments import TrainingArguments

PROCESS_GROUP_TIMEOUT = timedelta(minutes=30)  # preparing a corpus on the first rank may take a while


@dataclass(frozen=True)
class Launch:
    """This process's place in the run, from the variables that torchrun, deepspeed and our own start set."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Launch:
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world_size))),
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def processes_of(arguments: TrainingArguments) -> int:
    """How many processes of this machine the arguments ask for."""
    if arguments.env_type == "pytorch":
        return 1
    return max(arguments.num_gpus, arguments.model_parallel_size)


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


def start_missing_processes(world_size: int) -> int:
    """Runs this same command as `world_size` processes on this machine; returns the exit code of the job.

    The first process that fails takes the others down with it, and its exit code is the job's. ValueError if the
    machine has GPUs, but fewer than processes.
    """
    if 0 < torch.cuda.device_count() < world_size:
        raise ValueError(f"{world_size} processes need as many GPUs; this machine has {torch.cuda.device_count()}")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

    # A rank that fails says itself why.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    shared = {
        **cpu_environment(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "OMP_NUM_THREADS": cpu_environment(world_size)["OMP_NUM_THREADS"],
    }
    ranks = range(world_size)
    job = start_processes(
        name="rank",
        entrypoint=sys.executable,
        args={rank: tuple(sys.orig_argv[1:]) for rank in ranks},
        envs={rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks},
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        result = job.wait()
    except SignalException as stopped:
        for number in (signal.SIGINT, signal.SIGTERM):  # launchers repeat themselves while the ranks end
            signal.signal(number, signal.SIG_IGN)
        job.close(stopped.sigval)
        return 128 + stopped.sigval
    finally:
        job.close()
    if result is None or not result.is_failed():
        return 0
    first_failure = min(result.failures.values(), key=lambda failure: failure.timestamp)
    code = first_failure.exitcode
    return code if code > 0 else 128 - code  # a signal's number is reported as the shell does


def initialize_distributed(launch: Launch) -> torch.device:
    """Joins the process group (NCCL with GPUs, else gloo) and returns this process's device."""
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
        torch.cuda.set_device(launch.local_rank)
        return torch.device("cuda", launch.local_rank)
    torch.set_num_threads(int(cpu_environment(launch.local_world_size)["OMP_NUM_THREADS"]))
    return torch.device("cpu")


def leave_distributed() -> None:
    """Ends the process group, if there is one: its threads would abort the interpreter's end."""
    if dist.is_initialized():
        dist.destroy_process_group()
