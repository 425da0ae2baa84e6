"""What a person sees of a run, and what it leaves to look at: progress, metrics.jsonl, TensorBoard events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter

from .run_folder import RunFolder

LINES_WITHOUT_TERMINAL = 20  # how often a run into a log file says where it is


class RunReporter:
    """Shows progress on the console and writes every logged value to the run's folder."""

    def __init__(self, console: Console, run_folder: RunFolder, *, first_step: int, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._tensorboard = SummaryWriter(str(run_folder.tensorboard))
        self._metrics = run_folder.metrics_file.open("a", buffering=1)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=total_steps, completed=first_step, loss=0.0, speed=0.0)

    def __enter__(self) -> RunReporter:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        self._tensorboard.close()
        self._metrics.close()

    def training(self, step: int, values: dict[str, float]) -> None:
        self._log(step, "train", values)
        self._progress.update(
            self._task, completed=step, loss=values["loss"], speed=values["tokens_per_second"], refresh=True
        )
        every = max(1, self._total // LINES_WITHOUT_TERMINAL)
        if not self._console.is_terminal and (step % every == 0 or step == self._total):
            speed = values["tokens_per_second"]
            self._console.print(f"step {step}/{self._total}  loss {values['loss']:.3f}  {speed:,.0f} tokens/s")

    def evaluation(self, step: int, loss: float) -> None:
        self._log(step, "valid", {"loss": loss})
        self._console.print(f"step {step}: held-out loss {loss:.3f}")

    def saved(self, step: int, folder: Path) -> None:
        self._console.print(f"step {step}: saved {folder}")

    def _log(self, step: int, kind: str, values: dict[str, float]) -> None:
        record: dict[str, Any] = {"step": step, **{f"{kind}/{name}": value for name, value in values.items()}}
        self._metrics.write(json.dumps(record) + "\n")
        for name, value in values.items():
            self._tensorboard.add_scalar(f"{kind}/{name}", value, step)


class SilentReporter:
    """For every rank but the first."""

    def __enter__(self) -> SilentReporter:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def training(self, step: int, values: dict[str, float]) -> None:
        pass

    def evaluation(self, step: int, loss: float) -> None:
        pass

    def saved(self, step: int, folder: Path) -> None:
        pass
