"""JSON as a checkpoint may hold it: no duplicate keys, no NaN, no bottomless nesting. Also files with a digest."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LARGEST_JSON = 16 << 20  # bytes, of which Python makes up to 26 times as many


def parse_json(text: bytes, what: str, *, finite: bool = True) -> Any:
    """ValueError, naming `what`, for anything that is not one strict JSON value.

    finite: whether NaN and infinities, which JSON does not have but Python writes, are refused.
    """
    refused = {"parse_constant": _no_constant} if finite else {}
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, **refused)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{what} is not valid JSON: {reason}") from None


def read_json_object(path: Path, *, finite: bool = True) -> dict[str, Any]:
    """The object in a file. ValueError if it is missing, too large, or anything else. finite: see `parse_json`."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is no regular file")
        if found.st_size > LARGEST_JSON:
            raise ValueError(f"{path} has {found.st_size:,} bytes; JSON of a checkpoint has at most {LARGEST_JSON:,}")
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    value = parse_json(text, str(path), finite=finite)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
