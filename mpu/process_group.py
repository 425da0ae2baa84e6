"""Joins the process group of torch.distributed that a launcher (torchrun, deepspeed, srun)
prepared.
"""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

Backend = Literal["auto", "nccl", "gloo"]

DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own default for gloo


def join_process_group() -> bool:
    """Joins torch.distributed's process group if a launcher started this process.

    Returns:
        Whether this process now belongs to a process group.

    Raises:
        ValueError: RANK and WORLD_SIZE are set but MASTER_ADDR or MASTER_PORT is not, or a
            variable is not a number.
    """
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return True
    if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"RANK and WORLD_SIZE say that a launcher started this process, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; use torchrun "
            f"or deepspeed, or set both variables"
        )
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        # A launcher may show each process one GPU only, which then has the number 0.
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    init_process_group()
    atexit.register(_leave_process_group)
    return True


def init_process_group(timeout: timedelta | None = None, backend: Backend = "auto") -> None:
    """Creates the default process group from the launcher's variables.

    If MASTER_ADDR is this machine's loopback address, the rendezvous is open to this machine
    alone; torch's own listens on all addresses.

    Args:
        timeout: How long a collective may take; torch's default if None.
        backend: "auto" is NCCL with GPUs, else gloo. gloo sends tensors of a GPU through the
            host's memory, but several ranks may then share one GPU, which NCCL refuses.

    Raises:
        ValueError: The backend is "nccl", and there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if backend == "nccl" and not has_gpu:
        raise ValueError(
            "distributed_backend='nccl' needs a GPU, and this process sees none; "
            "use 'gloo' or 'auto'"
        )
    chosen: str = backend
    if backend == "auto":
        chosen = "nccl" if has_gpu else "gloo"

    # torchrun's agent has already opened a rendezvous of its own.
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_agent or os.environ["MASTER_ADDR"] not in ("localhost", "127.0.0.1"):
        dist.init_process_group(chosen, timeout=timeout)
        return
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    descriptor = None
    if rank == 0:
        descriptor = socket.create_server(address, backlog=world_size + 16).detach()
    store = cast(Any, dist).TCPStore(
        *address, world_size, rank == 0, timeout or DEFAULT_TIMEOUT, master_listen_fd=descriptor
    )
    dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _leave_process_group() -> None:
    """Destroys the process group, because its threads would abort the interpreter's shutdown."""
    if dist.is_initialized():
        dist.destroy_process_group()
