"""Reads text files line by line, and JSON files record by record, for all commands and tasks.

A byte order mark, which programs of Windows write, and their line ends are no part of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from ...files.strict_json import explain_json_error, parse_record
from ...files.working_copies import open_to_read

SNIFF_BYTES = 4096


def iter_text_lines(lines: Iterable[bytes], what: object) -> Iterator[tuple[int, str]]:
    """Yields the number (from 1) and the text of each line of UTF-8, without its end.

    Args:
        lines: An open binary file, or what yields its lines.
        what: The file, as messages call it.

    Raises:
        ValueError: A line is not UTF-8.
    """
    for number, raw in enumerate(lines, 1):
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"bad record in {what}, record {number}: {error}") from None
        yield number, text.removesuffix("\n").removesuffix("\r")


def read_text_lines(path: Path) -> list[str]:
    """Returns the lines of a text file; see `iter_text_lines`."""
    with open_to_read(path) as file:
        return [text for _, text in iter_text_lines(file, path)]


def iter_json_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the number (from 1) and the value of each record of a file of JSON lines, or of one
    JSON array. Blank lines are left out.

    Raises:
        ValueError: A record is not JSON; the message names the file and the record.
    """
    if begins_json_array(path):
        records = parse_json_text(_read_whole(path), f"{path} is not a JSON array")
        yield from enumerate(records, 1)
        return
    with open_to_read(path) as file:
        for number, raw in enumerate(file, 1):
            if not raw.isspace():
                yield number, parse_json_text(raw, f"bad record in {path}, record {number}")


def _read_whole(path: Path) -> bytes:
    with open_to_read(path) as file:
        return file.read()


def parse_json_text(raw: bytes, problem: str) -> Any:
    """Returns the value of JSON in UTF-8. Raises ValueError, which begins with `problem`."""
    try:
        return parse_record(raw)
    except JSONDecodeError as error:
        raise ValueError(f"{problem}: {explain_json_error(error)}") from None
    except ValueError as error:  # Invalid UTF-8 is one too.
        raise ValueError(f"{problem}: {error}") from None


def begins_json_array(path: Path) -> bool:
    """Returns whether a file begins with a JSON array of objects: with `[`, and then `{`.

    So a text that begins with a bracket is none.
    """
    beginning = _read_beginning(path)
    return beginning[:1] == b"[" and beginning[1:].lstrip()[:1] == b"{"


def begins_json(path: Path) -> bool:
    """Returns whether a file begins with a JSON object or a JSON array."""
    return _read_beginning(path)[:1] == b"{" or begins_json_array(path)


def _read_beginning(path: Path) -> bytes:
    """Returns the first bytes of a file after its byte order mark and white space."""
    with open_to_read(path) as file:
        return file.read(SNIFF_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
