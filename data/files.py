"""Reads a folder's files safely: only regular files of that folder, and only strict JSON.

Tokenizers and checkpoints are opened by the same rules, so both import this module.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, TypeGuard

LARGEST_JSON = 16 << 20  # bytes; the parsed Python objects take up to 26 times as much memory


def parse_json(text: bytes, what: str, *, finite: bool = True) -> Any:
    """Parses one strict JSON value. ValueError, naming `what`, for anything else.

    Args:
        finite: whether to refuse NaN and infinities, which are not JSON but which Python writes.
    """
    constant = _no_constant if finite else None
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=constant)
    except (
        ValueError,
        RecursionError,
    ) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{what} is not valid JSON: {reason}") from None


def read_json_object(
    path: Path, *, finite: bool = True, largest: int = LARGEST_JSON
) -> dict[str, Any]:
    """Returns the JSON object in a file of at most `largest` bytes. ValueError if there is none; see `parse_json`."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if found.st_size > largest:
            raise ValueError(
                f"{path} has {found.st_size:,} bytes; such a file has at most {largest:,}"
            )
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    value = parse_json(text, str(path), finite=finite)
    if not is_object(value):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Returns whether a parsed JSON value is an object."""
    return isinstance(value, dict)


def maps_to_text(value: object) -> TypeGuard[dict[str, str]]:
    """Returns whether a parsed JSON value is an object whose values are all strings."""
    return is_object(value) and all(isinstance(entry, str) for entry in value.values())


def checked_file(folder: Path, name: str) -> Path:
    """Returns `folder / name` after checking that it is a regular file of this folder.

    A symbolic link may point to a file of the folder itself, or into the `blobs` of a Hugging Face cache, whose
    snapshots are made of such links. ValueError for anything else.
    """
    if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name:
        raise ValueError(
            f"{folder} names a file {name!r}; a model's files must be in its own folder"
        )
    path = folder / name
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, on older Pythons
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read {path}: {reason}") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a regular file")
    home = folder.resolve()
    if real.parent != home and real.parent != home.parent.parent / "blobs":
        raise ValueError(
            f"{path} is a link out of its folder, to {real}; copy the file into the folder first"
        )
    return path


def read_folder_json(folder: Path, name: str, *, finite: bool = True) -> dict[str, Any] | None:
    """Returns the JSON object of a folder's file, or None if the file does not exist. ValueError if it is damaged."""
    path = folder / name
    return (
        read_json_object(checked_file(folder, name), finite=finite)
        if path.exists() or path.is_symlink()
        else None
    )


def printable(text: str) -> str:
    """Returns a text with the characters that could control a terminal, or reorder a line, as `\\x1b`."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {name!r} appears twice")
        values[name] = value
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
