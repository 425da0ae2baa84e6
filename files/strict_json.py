"""Reads JSON from files and lines of bounded size; files strictly, without repeated keys or NaN."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any, TypeGuard

from .safe_paths import checked_file

LARGEST_JSON = 16 << 20  # bytes; the parsed Python objects take up to 26 times as much memory


def parse_json(text: bytes, what: str, *, finite: bool = True) -> Any:
    """Parses one strict JSON value.

    Args:
        text: UTF-8.
        what: What a message calls the text.
        finite: Whether to refuse NaN and infinities, which are not JSON but which Python writes, and
            numbers that are too large for a float.

    Raises:
        ValueError: The text is no such value.
    """
    refuse_constants = _refuse_constant if finite else None
    parse_float = _parse_finite_float if finite else None
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_refuse_repeated_keys,
            parse_constant=refuse_constants,
            parse_float=parse_float,
        )
    except RecursionError:
        raise ValueError(f"{what} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # This includes JSONDecodeError and UnicodeDecodeError.
        raise ValueError(f"{what} is not valid JSON: {error}") from None


def read_json_object(
    path: Path, *, finite: bool = True, largest: int = LARGEST_JSON
) -> dict[str, Any]:
    """Returns the JSON object in a file of at most `largest` bytes.

    Raises:
        ValueError: The file cannot be read, is too large or no regular file, or holds something
            else; see `parse_json`.
    """
    try:
        text = read_regular_file(path, largest)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    value = parse_json(text, str(path), finite=finite)
    if not is_object(value):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_regular_file(path: Path, largest: int = LARGEST_JSON) -> bytes:
    """Returns the bytes of a small file.

    Raises:
        ValueError: It is too large, or no regular file: a pipe would wait for a writer.
        OSError: It cannot be read.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file")
    if found.st_size > largest:
        raise ValueError(f"{path} has {found.st_size:,} bytes; such a file has at most {largest:,}")
    return path.read_bytes()


def parse_record(line: bytes | str) -> Any:
    """Parses a user's line of JSON, which may begin with a byte order mark. Not strict: repeated
    keys and NaN pass, as in other readers of such lines.

    Raises:
        ValueError: It is no JSON, or nested too deeply.
    """
    text = line.decode("utf-8-sig") if isinstance(line, bytes) else line.removeprefix("\ufeff")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def explain_json_error(error: json.JSONDecodeError) -> str:
    """Returns what is wrong with a text that is not JSON, as one clause."""
    place = f"column {error.colno}"
    if "\n" in error.doc.rstrip("\n"):
        place = f"line {error.lineno}, {place}"
    is_string_open = error.msg.startswith("Unterminated string")
    if error.msg.startswith("Invalid control character"):
        if error.doc[error.pos :].strip():
            return f"not JSON: a line break or tab inside a string at {place}; write \\n or \\t"
        is_string_open = True
    if is_string_open:
        return "not JSON: it ends inside a string, as a text that was cut off does"
    if not error.doc[error.pos :].strip():
        return "not JSON: it ends too early, as a text that was cut off does"
    return f"not JSON: {error.msg.removesuffix(' at')} at {place}"


def read_folder_json(folder: Path, name: str, *, finite: bool = True) -> dict[str, Any] | None:
    """Returns the JSON object of a folder's file, or None if the file does not exist.

    Raises:
        ValueError: The file is a link that leads outside of the folder or nowhere, or it is damaged.
    """
    path = folder / name
    if not path.exists() and not path.is_symlink():
        return None
    return read_json_object(checked_file(folder, name), finite=finite)


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Returns whether a parsed JSON value is an object."""
    return isinstance(value, dict)


def maps_to_text(value: object) -> TypeGuard[dict[str, str]]:
    """Returns whether a parsed JSON value is an object whose values are all strings."""
    return is_object(value) and all(isinstance(entry, str) for entry in value.values())


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {name!r} appears twice")
        values[name] = value
    return values


def _parse_finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
