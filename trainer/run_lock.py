"""Lets one run at a time use a folder, also among hosts that share a disk."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import SoftFileLease, Timeout

from .launch.heartbeat import process_state

# The file that names the host and the process that use the folder; its time is refreshed while they
# live.
LOCK = ".run.lock"
SECONDS_WITHOUT_REFRESH = 60.0  # after which a process on another host counts as dead
SECONDS_TO_DECIDE = 70.0  # for which another run watches for such a refresh
# What precedes the number of a container's processes, in the name that filelock records of a host.
NAMESPACE = "?pidns-"


_taken: dict[Path, SoftFileLease] = {}  # by this process


def take_folder(folder: Path, notify: Callable[[str], None] = print) -> None:
    """Reserves a folder for this process, and creates it. A process may take a folder again.

    The lock of a process that no longer runs is replaced: at once on the same host, else (and if
    the process table still has it, or the disk cannot exchange two files, as NFS) after a minute
    without a sign of life, which this call waits for and announces through `notify`.

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
            if lease.owner is None or _runs_here(lease.owner):
                raise
            notify(f"{folder}: waiting to see whether {_describe_owner(lease)} still runs …")
            _wait_for(lease)
    except Timeout:
        raise ValueError(
            f"{folder} is in use by {_describe_owner(lease)}; wait for it or end it, or use "
            "another folder"
        ) from None
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"{folder} cannot be the run's folder, because a file is in its place; name another"
        ) from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ValueError(f"{folder} cannot be used: {reason}; choose another folder") from None
    _taken[path] = lease


def _wait_for(lease: SoftFileLease) -> None:
    """Takes the lease once its owner has shown no sign of life for long enough.

    Raises Timeout if it shows one.
    """
    before = _sign_of_life(lease)
    try:
        lease.acquire(timeout=SECONDS_TO_DECIDE, poll_interval=0.25)
    except Timeout:
        # The library replaces a stale lock only where the disk can exchange two files in one step.
        if _sign_of_life(lease) != before:
            raise
        lease.break_lock()
        lease.acquire()


def _sign_of_life(lease: SoftFileLease) -> tuple[Any, int]:
    """Returns what changes while the owner of a lease lives.

    Reading it makes NFS ask the server for the time.
    """
    owner = lease.owner
    with contextlib.suppress(OSError):
        return owner, os.stat(lease.lock_file).st_mtime_ns
    return owner, 0


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
    """Raises ValueError if this process took a folder and has lost it, because it stood still for
    too long.
    """
    lease = _taken.get(folder.resolve())
    if lease is not None and lease.compromise is not None:
        raise ValueError(
            f"{folder} is no longer this run's ({lease.compromise.reason}); another run may have "
            "taken it"
        )


def _runs_here(owner: Any) -> bool:
    """Returns whether the owner of a lease is a process of this host, and of this container, that
    has not ended.

    One that is only left in the process table has ended: a container's first process may reap none.
    """
    host, _, namespace = owner.hostname.partition(NAMESPACE)
    try:
        here = f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:  # no Linux
        here = ""
    return (
        host == socket.gethostname()
        and namespace in ("", here)
        and process_state(owner.pid) not in ("", "Z")
    )


def _describe_owner(lease: SoftFileLease) -> str:
    owner = lease.owner
    if not owner:
        return "another process"
    return f"process {owner.pid} on {owner.hostname.partition(NAMESPACE)[0]}"
