"""JSON as a checkpoint may hold it: no duplicate keys, no NaN, no bottomless nesting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LARGEST_JSON_FILE = 256 << 20


def parse_json(text: bytes, what: str) -> Any:
    """ValueError, naming `what`, for anything that is not one strict JSON value."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{what} is not valid JSON: {reason}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file. ValueError if it is missing, too large, or holds anything else."""
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON_FILE:
            raise ValueError(f"{path} has {size:,} bytes, more than any {path.name} of a checkpoint")
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    value = parse_json(text, str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
