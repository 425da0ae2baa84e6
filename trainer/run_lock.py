"""Lets one run at a time use a folder, also among hosts that share a disk."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from filelock import SoftFileLease, Timeout

from .launch.heartbeat import process_state

LOCK = ".run.lock"  # names the host and the process that use the folder; its time is refreshed while they live
SECONDS_WITHOUT_REFRESH = 60.0  # after which a process on another host counts as dead


_taken: dict[Path, SoftFileLease] = {}  # by this process


def take_folder(folder: Path, notify: Callable[[str], None] = print) -> None:
    """Reserves a folder for this process, and creates it. A process may take a folder again.

    The lock of a process that no longer runs is replaced: at once on the same host, else (and if the process table
    still has it) after a minute without a sign of life, which this call waits for and announces through `notify`.

    Raises ValueError if another process uses the folder, or the folder cannot be created.
    """
    path = folder.resolve()
    lease = _taken.get(path) or SoftFileLease(
        path / LOCK, timeout=0, lease_duration=SECONDS_WITHOUT_REFRESH, thread_local=False
    )
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            lease.acquire()
        except Timeout:
            here = lease.owner is not None and lease.owner.hostname == socket.gethostname()
            if lease.owner is None or (here and not _has_ended(lease.owner.pid)):
                raise
            notify(f"{folder}: waiting to see whether {_owner(lease)} still runs …")
            lease.acquire(timeout=SECONDS_WITHOUT_REFRESH + 10)
    except Timeout:
        raise ValueError(
            f"{folder} is in use by {_owner(lease)}; wait for it or end it, or use another folder"
        ) from None
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{folder} cannot be the run's folder, because a file is in its place; name another") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ValueError(f"{folder} cannot be used: {reason}; choose another folder") from None
    _taken[path] = lease


def return_folder(folder: Path) -> None:
    """Undoes one `take_folder`, and removes the folder if nothing has been written into it."""
    path = folder.resolve()
    lease = _taken[path]
    lease.release()
    if not lease.is_locked:
        del _taken[path]
        with contextlib.suppress(OSError):
            path.rmdir()


def check_taken(folder: Path) -> None:
    """Raises ValueError if this process took a folder and has lost it, because it stood still for too long."""
    lease = _taken.get(folder.resolve())
    if lease is not None and lease.compromise is not None:
        raise ValueError(f"{folder} is no longer this run's ({lease.compromise.reason}); another run may have taken it")


def _has_ended(pid: int) -> bool:
    """Returns whether a process is only left in the process table, as where a container's first process reaps none."""
    return process_state(pid) == "Z"


def _owner(lease: SoftFileLease) -> str:
    return f"process {lease.owner.pid} on {lease.owner.hostname}" if lease.owner else "another process"
