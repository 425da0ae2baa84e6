"""Writes files so that a crash leaves either the old contents or the new ones."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Writes a small file so that after a crash it has either its old or its new contents.

    The text is written under another name and flushed to the disk before the file is renamed.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # Someone may have put a link there.
    try:
        with partial.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of files, to the disk, so that it survives a crash."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
