"""Yields the documents of a source in order, and reports bad records."""

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
    """Counts of a source's documents and bad records, and descriptions of the first bad records."""

    documents: int = 0
    empty: int = 0
    bytes: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)

    def add(self, text: ChunkText, bad: list[BadRecord]) -> None:
        """Counts the documents of a chunk, and its bad records with their final numbers."""
        self.documents += len(text.documents)
        self.empty += text.empty
        self.bytes += text.bytes
        self.bad += len(bad)
        room = NAMED_BAD_RECORDS - len(self.first_bad)
        self.first_bad += [describe(record) for record in bad[:room]]


class LineNumbers:
    """Converts line numbers within a chunk to line numbers within the file.

    Chunks must come in order.

    Attributes:
        path: The current file.
        lines: Lines of the current file in the chunks so far.
    """

    def __init__(self, path: str = "", lines: int = 0) -> None:
        self.path = path
        self.lines = lines

    def number(self, chunk: Chunk, text: ChunkText) -> list[BadRecord]:
        """Returns the bad records of the next chunk with their numbers within the file."""
        if chunk.kind == "files":  # Each of its files is complete, so the numbers are final.
            return text.bad
        path = str(chunk.paths[0])
        if path != self.path:
            self.path = path
            self.lines = 0
        before = self.lines
        self.lines += text.lines
        return [replace(record, line=record.line + before) for record in text.bad]


def describe(record: BadRecord) -> str:
    """Returns a bad record's file, number and defect for a message."""
    return f"{record.path}, record {record.line}: {record.reason}"


def fail_on_bad(record: BadRecord) -> None:
    """Raises ValueError at the first bad record; the strict choice for `on_bad`."""
    raise ValueError(f"bad record in {describe(record)}")


def iter_documents(
    source: Source,
    *,
    text_key: str = "text",
    on_bad: OnBad = fail_on_bad,
    report: SourceReport | None = None,
) -> Iterator[str]:
    """Yields the texts of a source in a fixed order.

    A single text file is cut at blank lines into documents of about 16 KiB; in a folder each file
    is a document. Documents of white space are left out.

    Args:
        source: See `plan_chunks`.
        text_key: Key or column that holds the text.
        on_bad: Called for every bad record; it raises, or returns to skip the record.
        report: Receives the counts.

    Raises:
        ValueError: The source does not exist or has no text, or `on_bad` raises. A missing source
            is reported at the call, before the first document.
    """
    # A generator runs at the first document; a missing path shall be reported at the call.
    chunks = plan_chunks(source)
    return _iter_chunks(chunks, text_key, on_bad, report)


def _iter_chunks(
    chunks: list[Chunk], text_key: str, on_bad: OnBad, report: SourceReport | None
) -> Iterator[str]:
    numbers = LineNumbers()
    for chunk in chunks:
        text = read_chunk(chunk, text_key)
        bad = numbers.number(chunk, text)
        if report is not None:
            report.add(text, bad)
        for record in bad:
            on_bad(record)
        yield from text.documents


@dataclass
class Documents:
    """The documents of a source without its bad records, read again each time they are iterated
    over.

    Attributes:
        report: The counts of the last pass.
    """

    source: Source
    text_key: str = "text"
    report: SourceReport = field(default_factory=SourceReport)

    def __iter__(self) -> Iterator[str]:
        self.report = SourceReport()
        return iter_documents(
            self.source, text_key=self.text_key, on_bad=skip_bad, report=self.report
        )


def skip_bad(record: BadRecord) -> None:
    """Skips bad records; the lenient choice for `on_bad`.

    A `SourceReport` counts and describes them.
    """


def name_source(source: Source) -> str:
    """Returns the name of a source for messages."""
    if source is None:
        return "the Python standard library"
    if isinstance(source, (str, Path)):
        return str(source)
    return f"{len(source)} files"
