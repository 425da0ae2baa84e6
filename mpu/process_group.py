"""Joins the process group of torch.distributed that a launcher (torchrun, deepspeed, srun)
prepared.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

Backend = Literal["auto", "nccl", "gloo"]
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that a launcher sets

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
    if torch.cuda.is_available():
        local_rank = _read_number("LOCAL_RANK" if "LOCAL_RANK" in os.environ else "RANK")
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
        ValueError: The backend is "nccl", and there is no GPU. Or a launcher's variable is missing
            or not a number.
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

    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise ValueError(
            "a launcher has started this process, as its variables RANK and WORLD_SIZE say, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; use torchrun "
            f"or deepspeed, or set {', '.join(VARIABLES)}"
        )
    rank = _read_number("RANK")
    world_size = _read_number("WORLD_SIZE")
    port = _read_number("MASTER_PORT", most=65535)
    # torchrun's agent has already opened a rendezvous of its own.
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_agent or os.environ["MASTER_ADDR"] not in ("localhost", "127.0.0.1"):
        with ended_by_interrupt(world_size):
            dist.init_process_group(chosen, timeout=timeout)
        return
    descriptor = None
    if rank == 0:
        server = socket.create_server(("127.0.0.1", port), backlog=world_size + 16)
        descriptor = server.detach()
    with ended_by_interrupt(world_size):
        store = cast(Any, dist).TCPStore(
            "127.0.0.1",
            port,
            world_size,
            rank == 0,
            timeout or DEFAULT_TIMEOUT,
            master_listen_fd=descriptor,
        )
        dist.init_process_group(
            chosen, store=store, rank=rank, world_size=world_size, timeout=timeout
        )


@contextmanager
def ended_by_interrupt(world_size: int) -> Generator[None]:
    """A context in which Ctrl-C ends this process at once.

    Python would raise KeyboardInterrupt only when torch's code, which waits for ranks that have
    been interrupted as well, returns. A single process waits for none, and may be a notebook's.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    has_pythons_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if world_size == 1 or not in_main_thread or not has_pythons_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _read_number(name: str, most: int = 10**9) -> int:
    """Returns the number in a launcher's variable.

    Raises:
        ValueError: The variable is not a number from 0 to `most`.
    """
    text = os.environ[name]
    if not re.fullmatch(r"\s*[0-9]{1,10}\s*", text) or int(text) > most:
        raise ValueError(
            f"the environment variable {name}={text[:50]!r}, which a launcher sets, is not a number "
            f"from 0 to {most}"
        )
    return int(text)


def _leave_process_group() -> None:
    """Destroys the process group, because its threads would abort the interpreter's shutdown."""
    if dist.is_initialized():
        dist.destroy_process_group()
