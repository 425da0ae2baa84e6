"""Progress of the work that comes before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def corpus_progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage of preparing a corpus; a line for each where there is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    tasks = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(f"{stage} …")
            progress.update(tasks[stage], completed=done, total=total)

        yield show
