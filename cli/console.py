"""Formats a command's output on the terminal: errors, tables, lists of values, and progress."""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..files.printable import printable
from ..files.verbosity import is_quiet, is_verbose
from ..files.working_copies import name_urls
from .spellings import name_as_typed, name_options

USAGE_ERROR = 2
# Seconds between two lines of progress.
JSON_INTERVAL = 1.0
TEXT_INTERVAL = 10.0


def print_any_text() -> None:
    """Lets this process print what its terminal's encoding lacks, such as "…", as an escape.

    Otherwise the first such character would end a run.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _is_utf8(stream):
            stream.reconfigure(errors="backslashreplace")


def silence_optional_libraries() -> None:
    """Leaves out what torchao says of its own parts when transformers or peft import it: nothing here
    needs them. With `--verbose` it is printed.
    """
    if not is_verbose():
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).setLevel(logging.ERROR)


def prints_utf8() -> bool:
    """Returns whether standard output has every character of Unicode."""
    return _is_utf8(sys.stdout)


def _is_utf8(stream: Any) -> bool:
    encoding = getattr(stream, "encoding", None)
    return encoding is None or codecs.lookup(encoding).name == "utf-8"


# ------------------------------------------------------------------------------------------ errors


def run_and_report(
    work: Callable[[], int], *, quiet: bool = False, options: Iterable[str] = ()
) -> int:
    """Runs a command and returns its exit code.

    A user's error (`ValueError`, or `OSError` of a disk) becomes one line on stderr and exit code
    2; with `quiet`, the code alone.

    Args:
        options: The names of the command's arguments, which messages spell as options.
    """
    print_any_text()
    silence_optional_libraries()
    try:
        return work()
    except BrokenPipeError:
        raise  # The reader of our output has ended; see `main`.
    except Exception as error:
        known = find_user_error(error)
        if is_verbose():
            traceback.print_exc()
        if not quiet:
            print_error(known, options)
        return USAGE_ERROR


def find_user_error(error: Exception) -> ValueError | OSError:
    """Returns an error that is reported in one line. Raises it again if it is of another kind.

    Libraries in Rust, such as tokenizers and safetensors, raise errors of a disk as exceptions of
    their own.
    """
    if isinstance(error, ValueError | OSError):
        return error
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is None:
        raise error
    number = int(found[1])
    return OSError(number, os.strerror(number))


def print_error(error: ValueError | OSError, options: Iterable[str] = ()) -> None:
    """Prints one line, in which names from files cannot control the terminal.

    Args:
        options: The names of a command's arguments, which the line spells as options.
    """
    from rich.console import Console
    from rich.text import Text

    message = name_options(name_urls(explain_error(error)), options)
    message = name_as_typed(message, sys.argv[1:])
    line = Text(printable(" ".join(message.split())))
    Console(stderr=True, soft_wrap=True).print(Text("error: ", style="bold red") + line)


def explain_error(error: Exception) -> str:
    """Returns the text of an error; of the operating system's, what it was about."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if error.filename is None:
        return (
            f"cannot write: {error.strerror}; "
            f"the disk of the output or of the temporary files may be full"
        )
    return f"cannot read or write {os.fsdecode(error.filename)}: {error.strerror}"


# ------------------------------------------------------------------------------------------ values


def format_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a plain table, whose last column is aligned to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines: list[str] = []
    for row in (titles, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1].rjust(widths[-1])]))
    return "\n".join(lines) + "\n"


def format_facts(values: Mapping[str, object]) -> str:
    """Returns a line for each name and value."""
    width = max(map(len, values))
    lines: list[str] = []
    for name, value in values.items():
        lines.append(f"\n{name.replace('_', ' '):<{width}}  {printable(str(value))}")
    return "".join(lines)


def format_bytes(count: int) -> str:
    """Returns a size such as `1.42 GB`, in the largest unit (a power of 1000) that fits."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


# ---------------------------------------------------------------------------------------- progress


@contextmanager
def show_transfer(*, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows bytes, speed and remaining time on stderr.

    It is a bar on a terminal, and elsewhere a line now and then; with `as_json`, each line is a
    JSON object. With `--quiet` there is none. Yields a function that takes the bytes done and the bytes in all.
    """
    if is_quiet():
        yield lambda done, total: None
        return
    if as_json:
        yield _ProgressLines(JSON_INTERVAL, as_json=True).report
        return
    if not sys.stderr.isatty():
        yield _ProgressLines(TEXT_INTERVAL, as_json=False).report
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    parts = (
        BarColumn(bar_width=32),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*parts, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _ProgressLines:
    """Prints a line of progress each time that `interval` seconds are over.

    Work that is done before prints none.
    """

    def __init__(self, interval: float, *, as_json: bool) -> None:
        self._interval = interval
        self._as_json = as_json
        self._started = time.monotonic()
        self._printed = self._started
        # Bytes that an interrupted run had done before the work began.
        self._first: int | None = None

    def report(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._started = now
            self._first = done
        if now - self._printed < self._interval or done == self._first:
            return
        self._printed = now
        speed = (done - self._first) / max(now - self._started, 1e-9)  # bytes per second
        left = (total - done) / speed  # seconds
        if self._as_json:
            values = {
                "bytes": done,
                "total": total,
                "bytes_per_second": round(speed),
                "seconds_left": round(left, 1),
            }
            line = json.dumps(values)
        else:
            line = (
                f"{format_bytes(done)} of {format_bytes(total)}, "
                f"{format_bytes(round(speed))}/s, {left:.0f} s left"
            )
        print(line, file=sys.stderr, flush=True)
