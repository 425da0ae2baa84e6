"""A progress line for long preparations: chunks, documents/s and MB/s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .prepare import PrepareProgress, PrepareReport


@contextmanager
def prepare_progress(console: Console) -> Iterator[PrepareProgress]:
    """A callback for `prepare_dataset` that draws a bar on the console."""
    columns = (
        TextColumn("tokenising"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, rates="")

        def show(report: PrepareReport, done: int, total: int) -> None:
            rates = f"{report.documents_per_second:.0f} documents/s {report.megabytes_per_second:.1f} MB/s"
            bar.update(task, completed=done, total=total, rates=rates)

        yield show
