"""Measures the overhead of the training loop and of saving in the background, on the quickstart model.

python benchmarks/trainer.py --parts overhead saving
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages

import torch
import tyro
from rich.console import Console
from rich.table import Table

import shardzoo.trainer.trainer as trainer_module
from shardzoo.models import find_config, from_config
from shardzoo.trainer import Trainer, TrainingArguments
from shardzoo.trainer.checkpointing.saver import BackgroundSaver
from shardzoo.trainer.logging.reporter import SilentReporter
from shardzoo.trainer.loop import TrainingLoop


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    parts: tuple[str, ...] = ("overhead", "saving")
    rounds: int = 3
    """Number of runs in which saving is measured."""
    json: Path | None = None
    """Where to write the figures."""


class Samples:
    """An endless dataset of random tokens; sample i is a function of i."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size, self.length = vocab_size, length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, self.vocab_size, (self.length,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Clock(SilentReporter):
    """Measures the seconds from the end of each step to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def training(self, step: int, values: dict[str, float]) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [end - start for start, end in zip(self.ends[1:], self.ends[2:], strict=False)]


def ours(model: torch.nn.Module, data: Any, folder: str, **settings: Any) -> Clock:
    clock = Clock()
    defaults = {"log_interval": 1, "weight_decay": 0.0, "lr": 1e-4, "lr_schedule": "linear", "warmup_steps": 0}
    arguments = TrainingArguments(**{**defaults, "save_interval": 1 << 30, "save_dir": folder, **settings})
    Trainer(arguments).train(model, train_dataset=data, reporter=clock)
    return clock


class TimedEngine:
    """Wraps an engine and sums up the seconds of its forward passes, backward passes and optimizer steps."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.spent = engine, 0.0
        forward = engine.model.forward
        engine.model.forward = lambda *args, **kwargs: self._timed(forward, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def _timed(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = work(*args, **kwargs)
        self.spent += time.perf_counter() - started
        return result

    def backward(self, loss: Any) -> None:
        self._timed(self.engine.backward, loss)

    def step(self) -> Any:
        return self._timed(self.engine.step)


def overhead(arguments: Arguments) -> dict[str, Any]:
    """Measures which share of a step is spent outside the forward pass, the backward pass and the optimizer."""
    config = find_config("gpt2-quickstart").with_changes(vocab_size=2048)
    engines: list[TimedEngine] = []
    make = trainer_module.make_engine

    def timed(*args: Any) -> Any:
        engines.append(TimedEngine(make(*args)))
        return engines[-1]

    step, shares = TrainingLoop._train_step, []

    def measured(self: Any, signalled: Any) -> Any:
        before, started = engines[-1].spent, time.perf_counter()
        result = step(self, signalled)
        total = time.perf_counter() - started
        shares.append((total - (engines[-1].spent - before)) / total)
        return result

    trainer_module.make_engine, TrainingLoop._train_step = timed, measured  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = Samples(2048, config.max_sequence_length)
            clock = ours(from_config(config), data, folder, train_steps=30, micro_batch_size=4)
    finally:
        trainer_module.make_engine, TrainingLoop._train_step = make, step  # type: ignore[assignment]
    return {"step seconds": statistics.median(clock.seconds), "overhead": statistics.median(shares[2:])}


class SaverClock(BackgroundSaver):
    """Measures how long each save blocks training, and how long it takes to write."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocked: list[float] = []
        self.written: list[float] = []

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait_for_copy(self) -> None:
        started = time.perf_counter()
        super().wait_for_copy()
        if self.blocked:
            self.blocked[-1] += time.perf_counter() - started

    def _write(self, snapshot: Any, folder: Path) -> None:
        started = time.perf_counter()
        super()._write(snapshot, folder)
        self.written.append(time.perf_counter() - started)


def saving(arguments: Arguments) -> dict[str, Any]:
    """Measures what a background save costs the training of the quickstart model, as shares of a step.

    The stall is the time during which the loop cannot train: it collects the state, hands it over, and waits until it
    is copied. In addition, the copy, the digests and the writing compete with the steps for processors and memory. That
    slowdown is the extra time of all steps that run during a save.
    """
    config = find_config("gpt2-quickstart").with_changes(vocab_size=2048)
    data = Samples(2048, config.max_sequence_length)
    savers: list[SaverClock] = []
    save, step, busy = TrainingLoop.save, TrainingLoop._train_step, []

    def made(*args: Any) -> SaverClock:
        savers.append(SaverClock(*args))
        return savers[-1]

    def timed(self: Any) -> None:
        started = time.perf_counter()
        save(self)
        savers[-1].blocked.append(time.perf_counter() - started)

    def watched(self: Any, signalled: Any) -> Any:
        busy.append(savers[-1].is_busy)
        return step(self, signalled)

    every, quiet, saves, slowed, blocked, written = 20, [], 0, 0.0, [], []
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (TrainingLoop, "save", timed),
            (TrainingLoop, "_train_step", watched),
            (trainer_module, "BackgroundSaver", made),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for number in range(arguments.rounds):
            busy.clear()
            settings = {"save_interval": every, "save_total_limit": 1, "train_steps": 4 * every, "micro_batch_size": 4}
            clock = ours(from_config(config), data, f"{folder}/{number}", **settings)
            steps = list(zip(clock.seconds, busy[2:], strict=True))
            usual = statistics.median(seconds for seconds, saves_meanwhile in steps if not saves_meanwhile)
            quiet += [seconds for seconds, saves_meanwhile in steps if not saves_meanwhile]
            slowed += sum(seconds - usual for seconds, saves_meanwhile in steps if saves_meanwhile)
            saves += 3  # no step runs during the fourth save, which is at the end
            blocked += savers[-1].blocked[:3]
            written += savers[-1].written[:3]
    usual = statistics.median(quiet)
    return {
        "step seconds": usual,
        "spread of quiet steps, share of a step": statistics.stdev(quiet) / usual,
        "stall, share of a step": statistics.median(blocked) / usual,
        "largest stall, share of a step": max(blocked) / usual,
        "slowed in all by a save, share of a step": slowed / saves / usual,
        "slowed per step of an interval of 20": slowed / saves / usual / every,
        "seconds until a save is complete": statistics.median(written),
    }


PARTS = {"overhead": overhead, "saving": saving}


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    results = {part: PARTS[part](arguments) for part in arguments.parts}
    for part, values in results.items():
        table = Table(title=part, title_justify="left", show_header=False)
        for name, value in values.items():
            table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
        Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": torch.get_num_threads(), **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
