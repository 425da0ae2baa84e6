"""Reads one chunk of a source: its documents and its bad records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ...files.strict_json import explain_json_error
from ...files.working_copies import open_to_read
from .lines import iter_json_records
from .sources import Chunk

LARGEST_RECORD_BYTES = 16 << 20  # tokenizing a record takes about 50 times its size in memory


@dataclass(frozen=True)
class BadRecord:
    """A record without usable text.

    `line` counts from 1 within the chunk; rows and pieces count as lines.
    """

    path: Path
    line: int
    reason: str


@dataclass
class ChunkText:
    """The contents of a chunk.

    Attributes:
        bad: Records without usable text.
        lines: Number of lines (or rows), from which a caller can number bad records within the
            file.
        empty: Number of documents of white space, which are left out.
    """

    documents: list[str] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    lines: int = 0
    empty: int = 0
    bytes: int = 0

    def add(self, text: str) -> None:
        """Adds a document, unless it is white space."""
        if text and not text.isspace():
            self.documents.append(text)
        else:
            self.empty += 1


def read_chunk(chunk: Chunk, text_key: str = "text") -> ChunkText:
    """Reads the documents of one chunk.

    Bad records are returned, not raised; a missing file raises OSError.
    """
    readers = {
        "jsonl": _read_jsonl,
        "array": _read_array,
        "text": _read_text_range,
        "files": _read_files,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
    }
    found = ChunkText()
    readers[chunk.kind](chunk, text_key, found)
    return found


def _read_jsonl(chunk: Chunk, text_key: str, found: ChunkText) -> None:
    path = chunk.paths[0]
    with open_to_read(path) as file:
        for raw in lines_starting_in(file, chunk.start, chunk.stop):
            found.lines += 1
            found.bytes += len(raw)
            if len(raw) > LARGEST_RECORD_BYTES:
                reason = f"line longer than {LARGEST_RECORD_BYTES >> 20} MiB"
                found.bad.append(BadRecord(path, found.lines, reason))
            elif raw.isspace():
                found.empty += 1
            else:
                try:
                    found.add(parse_json_line(raw, text_key))
                except ValueError as error:
                    found.bad.append(BadRecord(path, found.lines, str(error)))


def _read_array(chunk: Chunk, text_key: str, found: ChunkText) -> None:
    path = chunk.paths[0]
    try:
        records = list(iter_json_records(path))
    except ValueError:
        found.lines = 1
        found.bad.append(BadRecord(path, 1, "the file begins with a JSON array, but is not one"))
        return
    for number, value in records:
        found.lines = number
        try:
            text = find_text(value, text_key)
        except ValueError as error:
            found.bad.append(BadRecord(path, number, str(error)))
            continue
        found.bytes += len(text.encode("utf-8"))
        found.add(text)


def parse_json_line(raw: bytes, text_key: str) -> str:
    """Returns the text of one JSON line. ValueError gives the defect of a bad line."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise ValueError(explain_json_error(error)) from None
    except RecursionError:
        raise ValueError("unusable JSON: nested too deeply") from None
    return find_text(value, text_key)


def find_text(value: object, text_key: str) -> str:
    """Returns the text of a parsed record. ValueError gives the defect of a bad one."""
    if not isinstance(value, dict):
        raise ValueError(
            f"a JSON {type(value).__name__} instead of an object with the key {text_key!r}"
        )
    if text_key not in value:
        named = ", ".join(map(repr, list(value)[:8])) or "none"
        raise ValueError(f"no key {text_key!r}; the keys are {named}")
    return check_text(value[text_key], f"the value of {text_key!r}")


def check_text(text: object, described: str) -> str:
    """Returns `text` if it is a string that UTF-8 can encode; otherwise raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"{described} is {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{described} has a lone surrogate at character {error.start}") from None
    return text


def lines_starting_in(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """Yields lines whose first byte is in [start, stop), each cut after LARGEST_RECORD_BYTES + 1
    bytes.
    """
    # The rest of the line before belongs to the range before. Skipping it from the byte before
    # `start` keeps a line that begins exactly there.
    file.seek(max(0, start - 1))
    if start > 0:
        _skip_line(file)
    position = file.tell()
    while position < stop:
        raw = file.readline(LARGEST_RECORD_BYTES + 1)
        if not raw:
            return
        if len(raw) > LARGEST_RECORD_BYTES and not raw.endswith(b"\n"):
            _skip_line(file)
        position = file.tell()
        yield raw


def _skip_line(file: BinaryIO) -> None:
    """Reads up to the end of the line, in parts of bounded size."""
    while True:
        part = file.readline(1 << 20)
        if not part or part.endswith(b"\n"):
            return


def _read_text_range(chunk: Chunk, text_key: str, found: ChunkText) -> None:
    _read_pieces(chunk.paths[0], chunk.start, chunk.stop, chunk.piece_bytes, found)


def _read_files(chunk: Chunk, text_key: str, found: ChunkText) -> None:
    for path in chunk.paths:
        _read_pieces(path, 0, path.stat().st_size, chunk.piece_bytes, found)


def _read_pieces(path: Path, start: int, stop: int, piece_bytes: int, found: ChunkText) -> None:
    """Reads a range of a text file, which is cut into documents of about `piece_bytes`."""
    with open_to_read(path) as file:
        for number, raw in enumerate(text_pieces(file, start, stop, piece_bytes), 1):
            found.lines += 1
            found.bytes += len(raw)
            if b"\0" in raw:
                reason = f"NUL byte at byte {raw.index(0)} of the piece: not text"
                found.bad.append(BadRecord(path, number, reason))
                continue
            try:
                found.add(raw.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                reason = f"invalid UTF-8 at byte {error.start} of the piece"
                found.bad.append(BadRecord(path, number, reason))


def _read_parquet(chunk: Chunk, text_key: str, found: ChunkText) -> None:
    from pyarrow.parquet import ParquetFile

    with open_to_read(chunk.paths[0]) as opened, ParquetFile(opened) as file:
        if text_key not in file.schema_arrow.names:
            names = ", ".join(map(repr, file.schema_arrow.names))
            raise ValueError(
                f"{chunk.paths[0]} has no column {text_key!r}; its columns are {names}"
            )
        groups = list(range(chunk.start, chunk.stop))
        for batch in file.iter_batches(row_groups=groups, columns=[text_key]):
            _add_rows(chunk.paths[0], batch.column(0).to_pylist(), text_key, found)


def _read_arrow(chunk: Chunk, text_key: str, found: ChunkText) -> None:
    from datasets import load_from_disk

    dataset = load_from_disk(str(chunk.paths[0]))
    if text_key not in dataset.column_names:
        names = ", ".join(map(repr, dataset.column_names))
        raise ValueError(f"{chunk.paths[0]} has no column {text_key!r}; its columns are {names}")
    rows = dataset[chunk.start : chunk.stop][text_key]
    _add_rows(chunk.paths[0], rows, text_key, found)


def _add_rows(path: Path, rows: list[object], text_key: str, found: ChunkText) -> None:
    for row in rows:
        found.lines += 1
        try:
            text = check_text(row, f"the value of {text_key!r}")
        except ValueError as error:
            found.bad.append(BadRecord(path, found.lines, str(error)))
            continue
        found.bytes += len(text.encode("utf-8"))
        found.add(text)


# Cuts of a text without line ends are about this far apart, and between characters.
HARD_CUT_BYTES = 1 << 20


def text_pieces(file: BinaryIO, start: int, stop: int, block: int) -> Iterator[bytes]:
    """Yields pieces whose first byte is in [start, stop), each about `block` bytes long.

    Each block of `block` bytes has one cut: after its first blank line, otherwise after its first
    line end. A cut thus depends on the file alone, and the pieces of adjoining ranges make up the
    whole file.
    """
    size = file.seek(0, 2)
    cut = _next_cut(file, start, block, size)
    while cut < min(stop, size):
        following = _next_cut(file, cut + 1, block, size)
        file.seek(cut)
        yield file.read(following - cut)
        cut = following


def _next_cut(file: BinaryIO, position: int, block: int, size: int) -> int:
    """Returns the first cut at or after `position`; 0 and `size` are cuts."""
    if position <= 0:
        return 0
    number = max(0, (position - 1) // block)
    while number * block < size:
        cut = _find_cut(file, number, block) if number else 0
        if cut is not None and cut >= position:
            return min(cut, size)
        number += 1
    return size


def _find_cut(file: BinaryIO, number: int, block: int) -> int | None:
    """Returns the cut in block `number` of a file; None if it has no line end and needs no cut."""
    first = number * block
    file.seek(first)
    raw = file.read(block)
    for separator in (b"\n\n", b"\r\n\r\n", b"\n"):
        found = raw.find(separator)
        if found >= 0:
            return first + found + len(separator)
    if number % max(1, HARD_CUT_BYTES // block):
        return None
    # A byte 10xxxxxx continues a UTF-8 character, which has at most four bytes.
    for ahead, byte in enumerate(raw[:4]):
        if byte & 0xC0 != 0x80:
            return first + ahead
    return first
