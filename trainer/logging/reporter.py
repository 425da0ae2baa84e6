"""Shows progress on the console, and logs values to metrics.jsonl and to experiment trackers."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ...files.working_copies import name_urls
from ..launch.stop_signal import printing
from .expert_load import describe_load
from .trackers import Tracker

LINES_WITHOUT_TERMINAL = 20  # number of progress lines if the output is a file
BAR_WIDTH = 10  # so that the elapsed and the remaining time fit into 80 columns
LONGEST_MEAN = 50  # logged steps whose mean loss a terminal shows


# "valid": an evaluation at an interval. "final": the one at the end, over all held-out samples.
Evaluation = Literal["valid", "final"]


class MetricsFile:
    """Writes `metrics.jsonl`, with a line for each logged step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Opened at the first line, because resuming replaces the file before.
        self._file: TextIO | None = None

    def log(self, step: int, values: dict[str, float]) -> None:
        self._file = self._file or self._path.open("a", buffering=1)
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()


class Reporter(Protocol):
    """Receives the events of a run, and is open while training runs.

    Only the first rank's shows and logs them.
    """

    def __enter__(self) -> Any: ...
    def __exit__(self, *exception: object) -> None: ...
    def training(self, step: int, values: dict[str, float]) -> None: ...
    def evaluation(
        self, step: int, values: dict[str, float], kind: Evaluation = "valid"
    ) -> None: ...
    def saved(self, step: int, folder: Path) -> None: ...
    def notice(self, text: str) -> None: ...


class RunReporter:
    """Shows progress on the console, and passes every logged value to `MetricsFile` and the
    trackers.

    The console shows mean losses, because the loss of one batch says little: a printed line that of
    all steps since the line before, the bar of a terminal that of the last few dozen logged steps.
    Lines are printed for the first logged step, about every twentieth of the run, and the last step.
    """

    def __init__(
        self,
        console: Console,
        trackers: Sequence[Tracker],
        *,
        first_step: int,
        total_steps: int | None,
        log_interval: int = 1,
    ) -> None:
        self._console = console
        self._total = total_steps
        # Only logged steps are told, so the steps between two lines are a multiple of theirs.
        least = max(1, (total_steps or 0) // LINES_WITHOUT_TERMINAL)
        self._line_interval = math.ceil(least / log_interval) * log_interval
        self._has_line = False
        self._trackers = trackers
        self._last_step = first_step
        # Logged means, and how many steps each is of: since the last printed line, and for the bar.
        self._since_line: list[tuple[float, int]] = []
        self._recent: deque[tuple[float, int]] = deque(maxlen=LONGEST_MEAN)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn(
                "loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"
                "{task.fields[experts]}"
            ),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(
            "train", total=total_steps, completed=first_step, loss=0.0, speed=0.0, experts=""
        )

    def __enter__(self) -> RunReporter:
        with printing():
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with printing():
            self._progress.stop()
        for tracker in self._trackers:
            tracker.close(failed=exception[0] is not None)

    def training(self, step: int, values: dict[str, float]) -> None:
        self._log(step, "train", values)
        speed = values["tokens_per_second"]
        if step <= self._last_step:
            # The last checkpoint was damaged, and the run continues from one before it.
            self._last_step = step - 1
        logged = (values["mean_loss"], step - self._last_step)
        self._last_step = step
        self._recent.append(logged)
        self._since_line.append(logged)
        with printing():
            self._progress.update(
                self._task,
                completed=step,
                loss=find_mean(self._recent),
                speed=speed,
                experts=describe_load(values),
                refresh=True,
            )
        if self._console.is_terminal:
            self._since_line = []
            return
        if not self._has_line or step % self._line_interval == 0 or step == self._total:
            self._has_line = True
            loss = find_mean(self._since_line)
            self._since_line = []
            self.notice(
                f"step {step}/{self._total or '?'}  loss {loss:.3f}  {speed:,.0f} target tokens/s"
                f"{describe_load(values)}"
            )

    def evaluation(self, step: int, values: dict[str, float], kind: Evaluation = "valid") -> None:
        self._log(step, kind, values)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        label = "final held-out" if kind == "final" else "held-out"
        self.notice(f"step {step}: {label} {shown}")

    def saved(self, step: int, folder: Path) -> None:
        self.notice(f"step {step}: saved {name_urls(str(folder))}")

    def notice(self, text: str) -> None:
        with printing():
            self._console.print(text)

    def _log(self, step: int, kind: str, values: dict[str, float]) -> None:
        named = {f"{kind}/{name}": value for name, value in values.items()}
        for tracker in self._trackers:
            tracker.log(step, named)


def find_mean(parts: Iterable[tuple[float, int]]) -> float:
    """Returns the mean of several means, each of which is given with its number of values."""
    parts = list(parts)
    return sum(mean * count for mean, count in parts) / sum(count for _, count in parts)


class SilentReporter:
    """Ignores all events; for every rank except the first."""

    def __enter__(self) -> SilentReporter:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def training(self, step: int, values: dict[str, float]) -> None:
        pass

    def evaluation(self, step: int, values: dict[str, float], kind: Evaluation = "valid") -> None:
        pass

    def saved(self, step: int, folder: Path) -> None:
        pass

    def notice(self, text: str) -> None:
        pass
