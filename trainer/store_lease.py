"""Lets one run at a time use a folder of an object store, by an object that names its owner.

The object is made only if there is none, which S3, Google Cloud Storage and `memory://` do in one
step. A store that makes it also where there is one, as older servers and emulators do, is noticed;
there a run looks again after two seconds whether the object is still its own. The owner writes it
anew every twenty seconds. One whose process has ended on this host is replaced at once, one from
elsewhere after a minute without a sign of life. Two runs on different hosts that replace the same
dead one in the same two seconds both look again, and one gives up. A run that stood still for
longer than a minute finds out before it sends its next checkpoint that it has lost the folder; an
upload that it had begun before may still arrive.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..files.object_store import find_object, read_object, remove_object, write_object
from ..files.working_copies import WorkingCopy
from .launch.heartbeat import process_state

LOCK_OBJECT = ".run.lock"
SECONDS_BETWEEN_SIGNS = 20.0
SECONDS_WITHOUT_SIGN = 70.0
SECONDS_TO_SETTLE = 2.0
# States of a process that has ended, of `process_state`.
NO_PROCESS = ""
ZOMBIE = "Z"


def find_namespace() -> str:
    """Returns the namespace of this container's processes, or "" where there is none."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:  # no Linux
        return ""


def is_here(host: str, namespace: str) -> bool:
    """Returns whether a process of a host and a namespace would be seen here."""
    return host == socket.gethostname() and namespace in ("", find_namespace())


@dataclass
class StoreLease:
    """This process's reservation of a folder in a store.

    Attributes:
        url: The object that names the owner.
        token: What no other owner has.
    """

    url: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    _ended: threading.Event = field(default_factory=threading.Event)
    _signs: int = 0

    def write(self, *, create: bool = False) -> None:
        self._signs += 1
        owner = {
            "token": self.token,
            "host": socket.gethostname(),
            "namespace": find_namespace(),
            "process": os.getpid(),
            "signs": self._signs,
        }
        write_object(self.url, json.dumps(owner).encode(), create=create)

    def create(self) -> bool:
        """Makes the object; returns whether the store has done so."""
        try:
            self.write(create=True)
        except FileExistsError:
            return False
        return True

    def is_own(self) -> bool:
        return _read_owner(self.url).get("token") == self.token

    def keep(self) -> None:
        """Gives signs of life in a thread, until `end`."""
        threading.Thread(target=self._give_signs, daemon=True, name="lease").start()

    def _give_signs(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_SIGNS):
            with suppress(OSError):  # A store that cannot be reached may be so again.
                if not self.is_own():
                    return
                self.write()

    def end(self) -> None:
        self._ended.set()
        with suppress(OSError):
            if self.is_own():
                remove_object(self.url)


_leases: dict[Path, StoreLease] = {}  # of this process


def take_in_store(path: Path, notify: Callable[[str], None]) -> None:
    """Reserves the folder in a store whose local copy a path is. Does nothing for other folders.

    Raises:
        ValueError: Another run uses it.
        OSError: The store cannot be reached, or refuses.
    """
    copy = WorkingCopy.find_whole(path)
    if copy is None:
        return
    lease = StoreLease(copy.remote(LOCK_OBJECT))
    # A store that does not know the condition would make it also where there is one: then the
    # second time, too.
    if find_object(lease.url) is not None or not lease.create():
        _replace(lease, copy.url, notify)
    elif lease.create():
        _settle(lease, copy.url)
    lease.keep()
    _leases[path] = lease


def _replace(lease: StoreLease, url: str, notify: Callable[[str], None]) -> None:
    """Takes the place of an owner that has ended, unless it is this process itself.

    Raises:
        ValueError: It still runs.
    """
    owner = _read_owner(lease.url)
    if owner.get("token") == lease.token:
        return  # The answer to the first request was lost, and the client has asked again.
    host = str(owner.get("host", ""))
    process = owner.get("process")
    name = f"process {process} on {host}"
    in_use = f"{url} is in use by {name}; wait for it or end it, or use another folder"
    if is_here(host, str(owner.get("namespace", ""))) and isinstance(process, int):
        if process_state(process) not in (NO_PROCESS, ZOMBIE):
            raise ValueError(in_use)
        lease.write()
        return
    notify(f"{url}: waiting to see whether {name} still runs …")
    before = find_object(lease.url)
    deadline = time.monotonic() + SECONDS_WITHOUT_SIGN
    while before is not None and time.monotonic() < deadline:
        time.sleep(min(1.0, SECONDS_WITHOUT_SIGN / 10))
        if find_object(lease.url) != before:
            raise ValueError(in_use)
    lease.write()
    _settle(lease, url)


def _settle(lease: StoreLease, url: str) -> None:
    """Raises ValueError if another run that began in the same moments has written last."""
    time.sleep(SECONDS_TO_SETTLE)
    if not lease.is_own():
        raise ValueError(f"{url} was taken by another run just now; use another folder")


def is_lost_in_store(path: Path) -> bool:
    """Returns whether this process has reserved a folder of a store and another one has it now."""
    lease = _leases.get(path)
    return lease is not None and not lease.is_own()


def return_in_store(path: Path) -> None:
    """Ends this process's reservation of a folder in a store, if it has one."""
    lease = _leases.pop(path, None)
    if lease is not None:
        lease.end()


def _read_owner(url: str) -> dict[str, object]:
    try:
        found = json.loads(read_object(url))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
