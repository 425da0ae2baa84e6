"""Sets up the environment of a rank: its process group, device, threads and memory."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from ...mpu import shared_memory
from ...mpu.mesh import ParallelMesh
from ...mpu.process_group import Backend, init_process_group
from .rank_info import RankInfo, count_threads, free_port
from .rank_process import LAUNCHER_PID, join_job
from .watchdog import watch_peers

if not torch.accelerator.is_available():
    # DeepSpeed reads it at import. Without it, every rank would warn that there is no other
    # accelerator.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def initialize_distributed(
    launch: RankInfo,
    *,
    backend: Backend = "auto",
    collective_timeout: float = 1800.0,
    stall_timeout: float = 300.0,
) -> torch.device:
    """Joins the process group and returns this process's device.

    With fewer GPUs than ranks on this machine, the ranks take turns: local rank r has GPU r modulo
    their number.

    Args:
        backend: See `mpu.process_group.init_process_group`.
        collective_timeout: Seconds that a collective waits for the other ranks.
        stall_timeout: Seconds after which a job that stands still is ended, if no launcher of ours
            watches it; 0 for never.
    """
    launch.export()
    join_job()
    if not dist.is_initialized():
        if launch.world_size == 1:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(free_port()))
            os.environ.setdefault("RANK", "0")
            os.environ.setdefault("WORLD_SIZE", "1")
            os.environ.setdefault("LOCAL_RANK", "0")
        init_process_group(timedelta(seconds=collective_timeout), backend)
        atexit.register(leave_distributed)
        if launch.world_size > 1 and stall_timeout and LAUNCHER_PID not in os.environ:
            watch_peers(launch.rank, launch.world_size, launch.local_rank, stall_timeout, _connect)
    if torch.cuda.is_available():
        # Under srun a task may see only its own GPU.
        index = launch.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        os.environ["LOCAL_RANK"] = str(index)  # DeepSpeed uses the GPU of this number
        return torch.device("cuda", index)
    torch.set_num_threads(count_threads(launch.local_world_size))
    return torch.device("cpu")


def _connect() -> Any:
    """Returns a connection to the rendezvous of its own, because a collective's may be blocked."""
    return cast(Any, dist).TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=10),
        wait_for_workers=False,
    )


def set_collective_timeout(mesh: ParallelMesh, seconds: float) -> None:
    """Sets the timeout of the mesh's groups, which torch creates with a constant one."""
    # The name of torch 2.14, and that of older releases.
    set_timeout = (
        getattr(dist, "set_timeout", None) or cast(Any, dist).distributed_c10d._set_pg_timeout
    )
    for group in mesh.groups:
        set_timeout(timedelta(seconds=seconds), group)
        shared_memory.set_timeout(group, seconds)


def single_device(name: str) -> torch.device:
    """Returns the device of a run in one process.

    Args:
        name: "auto" for the first GPU, or the CPU of a machine without one.

    Raises ValueError for a device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        usable = device.type != "meta" and torch.empty(1, device=device) is not None
    except (RuntimeError, AssertionError):
        usable = False  # an unknown name, or a device that torch was not built for
    if not usable:
        known = "'cpu'"
        found = torch.accelerator.current_accelerator()
        if found and torch.accelerator.is_available():
            known += f" or '{found.type}:0'"
        raise ValueError(f"pytorch_device {name!r} does not exist on this machine; use {known}")
    return device


def end_process(code: int) -> NoReturn:
    """Flushes the output and ends a rank at once.

    Threads of the process group could abort a normal exit.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_distributed() -> None:
    """Destroys the process group, if it exists. Its threads could abort the interpreter's exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
