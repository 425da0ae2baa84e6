"""The work folder of an unfinished conversion: its files, and which copies are complete, so that it can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from .copying import Digests

JOURNAL = ".journal.jsonl"
PARTIAL = ".partial"  # behind the names of weight files until they are complete
SYNC_SECONDS = 1.0


def open_partial(folder: Path, name: Path) -> int:
    """Returns a descriptor of an incomplete weight file of a work folder."""
    return os.open(folder / f"{name}{PARTIAL}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


class Journal:
    """The journal of a conversion. It is flushed to the disk once a second and locked against other processes.

    `finished` has the hashes of the target tensors of each finished copy, by the copy's index.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Opens or creates the journal. ValueError if another process writes it, or the fingerprint differs."""
        path = folder / JOURNAL
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        _lock(self._file, folder)
        self.finished: dict[int, Digests] = {}
        lines = _complete_lines(path)
        if lines:
            if lines[0].get("fingerprint") != fingerprint:
                self._file.close()
                raise ValueError(
                    f"{folder} was started with another source or other arguments, or the source has changed since; "
                    f"start again with --overwrite"
                )
            self.finished = {
                line["copy"]: _digests(line["sha256"]) for line in lines[1:] if "sha256" in line
            }
        else:
            self._file.truncate(0)
            self._append({"fingerprint": fingerprint})
        self._end_torn_line(path)
        self._synced = time.monotonic()

    def record(self, index: int, digests: Digests) -> None:
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

    def _end_torn_line(self, path: Path) -> None:
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            self._file.truncate(content.rfind(b"\n") + 1)


def check_unused(folder: Path) -> None:
    """Raises ValueError if another process is writing a conversion's journal in this folder."""
    if (folder / JOURNAL).exists():
        with (folder / JOURNAL).open("rb") as file:
            _lock(file, folder)


def _lock(file: IO[bytes], folder: Path) -> None:
    """Locks the file until it is closed. Closes it and raises ValueError if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"another process is writing {folder}") from None


def _complete_lines(path: Path) -> list[dict]:
    lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not isinstance(entry, dict):
            break
        lines.append(entry)
        if not line.endswith(b"\n"):
            lines.pop()
    return lines


def _digests(by_file: Mapping[str, Mapping[str, str]]) -> Digests:
    return {
        (Path(file), tensor): digest
        for file, tensors in by_file.items()
        for tensor, digest in tensors.items()
    }
