"""Adds a digest to the contents of small JSON files, verifies it, and writes such files durably."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_digest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as JSON represents them, with the sha256 of their contents as the last entry."""
    content = json.loads(json.dumps(values))
    return {**content, "sha256": _digest(content)}


def remove_digest(content: dict[str, Any], what: object) -> None:
    """Removes the entry of `add_digest`. Raises ValueError, naming `what`, if it does not match the contents."""
    if content.pop("sha256", None) != _digest(content):
        raise ValueError(f"{what} is damaged: its contents do not match its own sha256")


def write_durably(path: Path, text: str) -> None:
    """Writes a small file so that after a crash it has either its old or its new contents.

    The text is written under another name and flushed to the disk before the file is renamed.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # it might be a link
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


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
