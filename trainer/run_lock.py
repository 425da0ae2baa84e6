"""Lets one run at a time use a folder, also among hosts that share a disk."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import SoftFileLease, Timeout

from ..files.working_copies import name_urls, pull, push
from .launch.heartbeat import process_state
from .store_lease import (
    NO_PROCESS,
    ZOMBIE,
    is_here,
    is_lost_in_store,
    return_in_store,
    take_in_store,
)

# The file that names the host and the process that use the folder; its time is refreshed while they
# live.
LOCK = ".run.lock"
SECONDS_WITHOUT_REFRESH = 60.0  # after which a process on another host counts as dead
SECONDS_TO_DECIDE = SECONDS_WITHOUT_REFRESH + 10.0  # for which another run watches for one
# filelock records a host as its name and, after this, the inode of the namespace of its processes,
# which containers of one host do not share.
NAMESPACE = "?pidns-"


_taken: dict[Path, SoftFileLease] = {}  # by this process
_times: dict[Path, int] = {}  # how often it has taken each


def take_folder(folder: Path, notify: Callable[[str], None] = print) -> None:
    """Reserves a folder for this process, and creates it. A process may take a folder again, and
    returns it as often as it has taken it.

    Of a local copy of a folder in an object store, the folder there is reserved too, and the copy
    is made equal to it. The lock of a process that no longer runs is replaced:

    - at once, if the process ran on this host, and neither the process table nor the disk is in the
      way (NFS cannot exchange two files);
    - else after a minute without a sign of life. This call waits for it, and says so by `notify`.

    Raises:
        ValueError: Another process uses the folder, or the folder cannot be created.
    """
    path = folder.resolve()
    is_first = path not in _taken
    lease = _taken.get(path) or SoftFileLease(
        path / LOCK, timeout=0, lease_duration=SECONDS_WITHOUT_REFRESH, thread_local=False
    )
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            _acquire(lease)
        except Timeout:
            # Of an owner that cannot be read, nothing says that it has ended.
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
    _times[path] = _times.get(path, 0) + 1
    if is_first:
        try:
            take_in_store(path, notify)
            pull(path, largest=sys.maxsize)
        except BaseException:
            return_folder(folder, send=False)
            raise


def _acquire(lease: SoftFileLease) -> None:
    """Takes the lease, also that of a process of this host that has ended.

    Raises Timeout if another process has it.
    """
    try:
        lease.acquire()
    except Timeout:
        # filelock 4.1 and earlier have only removed the lock of such a process.
        if os.path.lexists(lease.lock_file):
            raise
        lease.acquire()


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

    NFS asks its server for the modification time, because reading the owner has opened the file.
    """
    owner = lease.owner
    with contextlib.suppress(OSError):
        return owner, os.stat(lease.lock_file).st_mtime_ns
    return owner, 0


def return_folder(folder: Path, *, send: bool = True) -> None:
    """Undoes one `take_folder`, and removes the folder if nothing has been written into it.

    What a local copy of a folder in an object store has is sent there first, unless `send` is
    False.
    """
    path = folder.resolve()
    lease = _taken[path]
    try:
        _times[path] -= 1
        if _times[path] == 0:
            if send and lease.compromise is None and not is_lost_in_store(path):
                push(path, at_once=False)
            return_in_store(path)
    finally:
        lease.release()
    if not lease.is_locked:
        del _taken[path]
        del _times[path]
        with contextlib.suppress(OSError):
            path.rmdir()


def find_user(folder: Path) -> str | None:
    """Returns which other process of this host uses a folder, such as "process 7 on host"; None if
    none is known to.
    """
    path = folder.resolve()
    if path in _taken:
        return None
    lease = SoftFileLease(path / LOCK, timeout=0, lease_duration=SECONDS_WITHOUT_REFRESH)
    owner = lease.owner
    return _describe_owner(lease) if owner and _runs_here(owner) else None


def check_not_lost(folder: Path) -> None:
    """Raises ValueError if this process took a folder and has lost it, because it stood still for
    too long.
    """
    lease = _taken.get(folder.resolve())
    if lease is not None and lease.compromise is not None:
        raise ValueError(
            f"{folder} is no longer this run's ({lease.compromise.reason}); another run may have "
            "taken it"
        )
    if is_lost_in_store(folder.resolve()):
        raise ValueError(
            f"{name_urls(str(folder))} is no longer this run's; another run has taken it"
        )


def _runs_here(owner: Any) -> bool:
    """Returns whether the owner of a lease is a process of this host, and of this container, that
    has not ended.

    One that is only left in the process table has ended: a container's first process may reap none.
    """
    host, _, namespace = owner.hostname.partition(NAMESPACE)
    return is_here(host, namespace) and process_state(owner.pid) not in (NO_PROCESS, ZOMBIE)


def _describe_owner(lease: SoftFileLease) -> str:
    owner = lease.owner
    if not owner:
        return "another process"
    return f"process {owner.pid} on {owner.hostname.partition(NAMESPACE)[0]}"
