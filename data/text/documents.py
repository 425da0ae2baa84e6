"""Documents of a source, one after the other, and what becomes of records that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from .records import BadRecord, ChunkText, read_chunk
from .sources import Chunk, Source, plan_chunks

NAMED_BAD_RECORDS = 10

OnBad = Callable[[BadRecord], None]


@dataclass
class SourceReport:
    """Counts over a source, and the first bad records by name."""

    documents: int = 0
    empty: int = 0
    bytes: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)

    def add(self, text: ChunkText, bad: list[BadRecord]) -> None:
        self.documents += len(text.documents)
        self.empty += text.empty
        self.bytes += text.bytes
        self.bad += len(bad)
        room = NAMED_BAD_RECORDS - len(self.first_bad)
        self.first_bad += [describe(record) for record in bad[:room]]


class LineNumbers:
    """Turns line numbers within a chunk into line numbers within the file, given the chunks in order.

    `path` and `lines` say how many lines of the latest file have passed; a file's chunks follow each other.
    """

    def __init__(self, path: str = "", lines: int = 0) -> None:
        self.path, self.lines = path, lines

    def number(self, chunk: Chunk, text: ChunkText) -> list[BadRecord]:
        if chunk.kind == "files":  # each file is whole, so its numbers are final
            return text.bad
        if str(chunk.paths[0]) != self.path:
            self.path, self.lines = str(chunk.paths[0]), 0
        before = self.lines
        self.lines += text.lines
        return [replace(record, line=record.line + before) for record in text.bad]


def describe(record: BadRecord) -> str:
    return f"{record.path}, record {record.line}: {record.reason}"


def fail_on_bad(record: BadRecord) -> None:
    """The strict choice for `on_bad`: the first bad record is a ValueError that names it."""
    raise ValueError(f"bad record in {describe(record)}")


def iter_documents(
    source: Source,
    *,
    text_key: str = "text",
    on_bad: OnBad = fail_on_bad,
    report: SourceReport | None = None,
) -> Iterator[str]:
    """Texts of a text file, a folder, JSON lines, parquet, or None (the Python standard library), in a fixed
    order.

    White-space documents are left out. `on_bad` is called for every defective record; it raises or returns
    (skip). A single text file is cut at blank lines into documents of about 16 KiB; in a folder each file is
    a document.

    Raises:
        ValueError: nothing there, no text, or what `on_bad` raises; before the first document where possible.
    """
    chunks = plan_chunks(source)  # outside the generator, so that a missing path is reported at the call
    return _read(chunks, text_key, on_bad, report)


def _read(chunks: list[Chunk], text_key: str, on_bad: OnBad, report: SourceReport | None) -> Iterator[str]:
    numbers = LineNumbers()
    for chunk in chunks:
        text = read_chunk(chunk, text_key)
        bad = numbers.number(chunk, text)
        if report is not None:
            report.add(text, bad)
        for record in bad:
            on_bad(record)
        yield from text.documents


def skip_bad(record: BadRecord) -> None:
    """The lenient choice for `on_bad`; pass a `SourceReport` to count and name what was skipped."""


def source_name(source: Source) -> str:
    """How a source is called in messages."""
    if source is None:
        return "the Python standard library"
    return str(source) if isinstance(source, (str, Path)) else f"{len(source)} files"
