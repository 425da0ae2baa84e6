"""Small JSON files of a checkpoint: with a digest of their contents, and written durably."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_digest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as JSON has them, with their own sha256 as the last entry."""
    content = json.loads(json.dumps(values))
    return {**content, "sha256": _digest(content)}


def take_digest(content: dict[str, Any], what: object) -> None:
    """Removes the sha256 of `add_digest`. ValueError, naming `what`, if the contents are not those it was made of."""
    if content.pop("sha256", None) != _digest(content):
        raise ValueError(f"{what} is damaged: its contents do not match its own sha256")


def write_durably(path: Path, text: str) -> None:
    """Writes a small file under another name, flushes it to the disk, and renames it: the new contents or the old."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes what was created or renamed in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
