"""Lets training say what it is doing, so that a rank that hangs can be described in these words.

    with phase("data"):
        batch = next(batches)

A phase belongs to the thread that states it. The words are also kept in a small memory-mapped file,
if a launcher of ours watches this process: it can then read the phase of a process that no longer
runs any code.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

OUTSIDE = "before or after training"
SAVE = "save"
RANK_0 = "work of rank 0"
# The length of these phases says nothing: a disk, a corpus or a user may take as long as they need.
LONG_PHASES = (SAVE, RANK_0, OUTSIDE)

FILE_SIZE = 128  # bytes; a description is cut off there

_phases: dict[int, list[str]] = {}  # thread -> the phases it is in, the innermost last
_files: list[mmap.mmap] = []  # at most one


@contextmanager
def phase(name: str) -> Generator[None]:
    """States that this thread is in a phase.

    Phases nest, and the innermost counts. Also a decorator of functions.
    """
    phases = _phases.setdefault(threading.get_ident(), [])
    phases.append(name)
    _publish()
    try:
        yield
    finally:
        phases.pop()
        _publish()


def current_phase() -> str:
    """Returns the main thread's phase, followed by ", during a save" if another thread saves
    meanwhile.
    """
    main = threading.main_thread().ident
    own = _phases.get(main or 0)
    name = own[-1] if own else OUTSIDE
    others = [phases for thread, phases in list(_phases.items()) if thread != main]
    if name != SAVE and any(SAVE in phases for phases in others):
        return f"{name}, during a save"
    return name


def is_long(name: str) -> bool:
    """Returns whether a phase, as `current_phase` describes it, may take any time."""
    return name.partition(",")[0] in LONG_PHASES


def publish_phases(path: Path) -> None:
    """Keeps the current phase in a file from now on, for `read_phase`."""
    path.write_bytes(bytes(FILE_SIZE))
    with path.open("r+b") as file:
        _files[:] = [mmap.mmap(file.fileno(), FILE_SIZE)]
    _publish()


def read_phase(path: Path) -> str:
    """Returns the phase of the process that publishes its phases in a file, or "" if none does."""
    with suppress(OSError):
        return path.read_bytes().rstrip(b"\0").decode(errors="replace")
    return ""


def _publish() -> None:
    for file in _files:
        text = current_phase().encode()
        file[:] = text[:FILE_SIZE].ljust(FILE_SIZE, b"\0")
