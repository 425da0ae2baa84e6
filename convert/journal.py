"""The journal of an unfinished conversion: which copies are complete, so that it can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ..files.safe_paths import is_named
from .copying import Digests

JOURNAL = ".journal.jsonl"
PARTIAL = ".partial"  # behind the names of weight files until they are complete
SYNC_SECONDS = 1.0


def open_partial(folder: Path, name: Path) -> int:
    """Returns a descriptor of an incomplete weight file of a work folder."""
    return os.open(folder / f"{name}{PARTIAL}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


class Journal:
    """The journal of a conversion, in the folder where its files are written.

    The first line has the fingerprint of the conversion, each other line a finished copy. The file
    is flushed to the disk once a second and locked against other processes.

    Attributes:
        finished: Index of a finished copy -> the hashes of the tensors that it wrote.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Opens or creates the journal.

        Raises:
            ValueError: Another process writes it, or the fingerprint differs.
        """
        path = folder / JOURNAL
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        _lock(self._file, path)
        self.finished: dict[int, Digests] = {}
        lines = _read_complete_lines(path)
        if lines:
            if lines[0].get("fingerprint") != fingerprint:
                self._file.close()
                raise ValueError(
                    f"{folder} was started with another source or other arguments, "
                    f"or the source has changed since; start again with --overwrite"
                )
            for line in lines[1:]:
                if "sha256" in line:
                    self.finished[line["copy"]] = _flatten_digests(line["sha256"])
        else:
            self._file.truncate(0)
            self._append({"fingerprint": fingerprint})
        self._cut_torn_line(path)
        self._synced = time.monotonic()

    def record(self, index: int, digests: Digests) -> None:
        """Adds a finished copy."""
        by_file: dict[str, dict[str, str]] = {}
        for (file, tensor), digest in digests.items():
            by_file.setdefault(str(file), {})[tensor] = digest
        self._append({"copy": index, "sha256": by_file})
        self.finished[index] = digests
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def _append(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")

    def _cut_torn_line(self, path: Path) -> None:
        """Removes the last line if a crash left it unfinished."""
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            self._file.truncate(content.rfind(b"\n") + 1)


def check_unused(folder: Path) -> None:
    """Raises ValueError if another process is writing a conversion's journal in this folder."""
    path = folder / JOURNAL
    if path.exists():
        with path.open("rb") as file:
            _lock(file, path)


def _lock(file: IO[bytes], path: Path) -> None:
    """Locks the journal until it is closed.

    Raises:
        ValueError: Another process has locked it, or has finished or replaced the conversion since
            the file was opened. The file is closed.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"another process is writing {path.parent}") from None
    if not is_named(file.fileno(), path):
        file.close()
        raise ValueError(
            f"another process was writing {path.parent} and has ended or begun again just now"
        )


def _read_complete_lines(path: Path) -> list[dict]:
    """Returns the objects of all lines before the first one that is torn or damaged."""
    lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not isinstance(entry, dict):
            break
        lines.append(entry)
    return lines


def _flatten_digests(by_file: Mapping[str, Mapping[str, str]]) -> Digests:
    digests: Digests = {}
    for file, tensors in by_file.items():
        for tensor, digest in tensors.items():
            digests[Path(file), tensor] = digest
    return digests
