"""Measures the overhead of the training loop and of saving in the background, by default on the quickstart model.

python benchmarks/trainer.py --parts overhead saving
torchrun --nproc-per-node 2 benchmarks/trainer.py --parts saving --env-type deepspeed --zero-stage 2
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
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

import shardzoo.trainer.checkpointing.snapshot as snapshot_module
import shardzoo.trainer.trainer as trainer_module
from shardzoo.models import find_config, from_config
from shardzoo.trainer import Trainer, TrainingArguments
from shardzoo.trainer.checkpointing.saver import BackgroundSaver
from shardzoo.trainer.logging.reporter import SilentReporter
from shardzoo.trainer.loop import TrainingLoop
from shardzoo.trainer.step import TrainingStep


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    parts: tuple[str, ...] = ("overhead", "saving")
    rounds: int = 3
    """Number of runs in which saving is measured."""
    width: int | None = None
    """Hidden size of another model than the quickstart, with as many layers as `layers`."""
    layers: int = 3
    micro_batch_size: int = 4
    threads: int | None = None
    """Threads of each process."""
    env_type: str = "pytorch"
    """The engine of saving's runs. Under torchrun: pytorchDDP, or deepspeed with a `zero_stage`."""
    zero_stage: int = 0
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
    defaults = {
        "log_interval": 1,
        "weight_decay": 0.0,
        "lr": 1e-4,
        "lr_schedule": "linear",
        "warmup_steps": 0,
    }
    arguments = TrainingArguments(
        **{**defaults, "save_interval": 1 << 30, "save_dir": folder, **settings}
    )
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

    def step(self, found_inf: Any = None) -> Any:
        return self._timed(self.engine.step, found_inf)


def overhead(arguments: Arguments) -> dict[str, Any]:
    """Measures which share of a step is spent outside the forward pass, the backward pass and the optimizer."""
    config = find_config("gpt2-quickstart").with_changes(vocab_size=2048)
    engines: list[TimedEngine] = []
    make = trainer_module.make_engine

    def timed(*args: Any) -> Any:
        engines.append(TimedEngine(make(*args)))
        return engines[-1]

    run_step = TrainingStep.run
    shares = []

    def measured(self: Any, *args: Any) -> Any:
        before, started = engines[-1].spent, time.perf_counter()
        result = run_step(self, *args)
        total = time.perf_counter() - started
        shares.append((total - (engines[-1].spent - before)) / total)
        return result

    trainer_module.make_engine, TrainingStep.run = timed, measured  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = Samples(2048, config.max_sequence_length)
            clock = ours(from_config(config), data, folder, train_steps=30, micro_batch_size=4)
    finally:
        trainer_module.make_engine, TrainingStep.run = make, run_step  # type: ignore[assignment]
    return {
        "step seconds": statistics.median(clock.seconds),
        "overhead": statistics.median(shares[2:]),
    }


class SaverClock(BackgroundSaver):
    """Measures how long each save blocks training, of what that consists, and how long it takes to write."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.blocked: list[dict[str, float]] = []
        self.written: list[float] = []

    @property
    def is_busy(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def note(self, part: str, started: float) -> None:
        if self.blocked:
            self.blocked[-1][part] = self.blocked[-1].get(part, 0.0) + time.perf_counter() - started

    def save(self, snapshot: Any) -> Path:
        started = time.perf_counter()
        folder = super().save(snapshot)
        self.note("handing over", started)
        return folder

    def wait_for_copy(self) -> None:
        started = time.perf_counter()
        super().wait_for_copy()
        self.note("waiting for the copy", started)

    def _write(self, snapshot: Any, folder: Path, copy: Any) -> None:
        started = time.perf_counter()
        super()._write(snapshot, folder, copy)
        self.written.append(time.perf_counter() - started)


@dataclass
class Saves:
    """What one rank's saves took."""

    steps: list[tuple[float, bool]]  # seconds, and whether a save ran meanwhile
    blocked: list[dict[str, float]]  # seconds by part
    written: list[float]
    bytes: int
    peak: int

    def values(self, every: int) -> dict[str, float]:
        quiet = [seconds for seconds, busy in self.steps if not busy]
        usual = statistics.median(quiet)
        slowed = (
            sum(seconds - usual for seconds, busy in self.steps if busy) / len(self.blocked) / usual
        )
        stalls = [sum(parts.values()) / usual for parts in self.blocked]
        names = dict.fromkeys(name for parts in self.blocked for name in parts)
        return {
            "step seconds": usual,
            "spread of quiet steps, share of a step": statistics.stdev(quiet) / usual,
            "stall, share of a step": statistics.median(stalls),
            "largest stall, share of a step": max(stalls),
            **{
                f"- {name}": statistics.median(p.get(name, 0.0) for p in self.blocked) / usual
                for name in names
            },
            **{
                f"- {name}, largest": max(p.get(name, 0.0) for p in self.blocked) / usual
                for name in names
            },
            "slowed in all by a save, share of a step": slowed,
            f"slowed per step of an interval of {every}": slowed / every,
            "seconds until a save is complete": statistics.median(self.written),
            "MB written of a checkpoint": self.bytes / 1e6,
            "peak memory, MiB": self.peak / (1 << 20),
        }


def saving(arguments: Arguments) -> dict[str, Any]:
    """Measures what a background save costs the training of a model, as shares of a step, on each rank.

    The stall is the time during which the loop cannot train: it collects the state, hands it over, and waits until it
    is copied. In addition, the copy, the digests and the writing compete with the steps for processors and memory. That
    slowdown is the extra time of all steps that run during a save.
    """
    every, runs = 20, list[Saves]()
    with tempfile.TemporaryDirectory() as own:
        folder = shared(own)
        for number in range(arguments.rounds):
            runs.append(run_with_saves(arguments, f"{folder}/{number}", every))
    found = Saves(
        [step for run in runs for step in run.steps],
        [parts for run in runs for parts in run.blocked],
        [seconds for run in runs for seconds in run.written],
        runs[-1].bytes,
        statistics.median_low(run.peak for run in runs),
    )
    ranks = gathered(found.values(every))
    rows = {name: [values[name] for values in ranks] for name in ranks[0]}
    written, peaks = rows["MB written of a checkpoint"], rows["peak memory, MiB"]
    rows["most bytes of a rank, over the fewest"] = [max(written) / min(written)]
    rows["rank 0's peak above the lowest, MiB"] = [peaks[0] - min(peaks)]
    return {name: values[0] if len(values) == 1 else values for name, values in rows.items()}


def shared(value: Any) -> Any:
    """Returns rank 0's value."""
    return gathered(value)[0]


def gathered(value: Any) -> list[Any]:
    """Returns the values of all ranks."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return [value]
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def run_with_saves(arguments: Arguments, folder: str, every: int) -> Saves:
    """Trains with four saves, of which the last, after the last step, is left out."""
    config = find_config("gpt2-quickstart").with_changes(vocab_size=2048)
    if arguments.width:
        config = config.with_changes(n_embd=arguments.width, n_layer=arguments.layers)
    savers, busy, written = list[SaverClock](), list[bool](), dict[str, int]()
    save, run_step, write = TrainingLoop.save, TrainingStep.run, snapshot_module.write_share

    def made(*args: Any, **settings: Any) -> SaverClock:
        savers.append(SaverClock(*args, **settings))
        return savers[-1]

    def timed(self: Any) -> None:
        savers[-1].blocked.append({})
        started = time.perf_counter()
        save(self)
        savers[-1].note("collecting", started)
        savers[-1].blocked[-1]["collecting"] -= savers[-1].blocked[-1]["handing over"]

    def watched(self: Any, *args: Any) -> Any:
        busy.append(savers[-1].is_busy)
        return run_step(self, *args)

    def noted(path: Path, share: Any) -> Any:
        ranges, digest = write(path, share)
        written[path.name] = sum(end - first for first, end in ranges)
        return ranges, digest

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (TrainingLoop, "save", timed),
            (TrainingStep, "run", watched),
            (trainer_module, "BackgroundSaver", made),
            (snapshot_module, "write_share", noted),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
        settings = {
            "save_interval": every, "save_total_limit": 1, "train_steps": 4 * every, "env_type": arguments.env_type,
            "micro_batch_size": arguments.micro_batch_size,
        }  # fmt: skip
        zero = (
            {"zero_stage": arguments.zero_stage}
            if arguments.env_type.startswith("deepspeed")
            else {}
        )
        clock = ours(
            from_config(config),
            Samples(2048, config.max_sequence_length),
            folder,
            **settings,
            **zero,
        )
    steps = list(zip(clock.seconds, busy[2:], strict=True))
    return Saves(
        steps, savers[-1].blocked[:3], savers[-1].written[:3], sum(written.values()), peak_memory()
    )


def peak_memory() -> int:
    """Returns the largest resident size of this process, in bytes, since it was reset."""
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) << 10


PARTS = {"overhead": overhead, "saving": saving}


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = {part: PARTS[part](arguments) for part in arguments.parts}
    if int(os.environ.get("RANK", "0")):
        return
    for part, values in results.items():
        table = Table(title=part, title_justify="left", show_header=False)
        for name, value in values.items():
            table.add_row(name, *map(shown, value if isinstance(value, list) else [value]))
        Console().print(table)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"threads": torch.get_num_threads(), **results}, indent=1) + "\n"
        )


def shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
