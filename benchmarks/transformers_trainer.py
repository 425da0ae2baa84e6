"""Compares training steps of transformers' Trainer, of ours with their model, and of ours with our model.

    python benchmarks/transformers_trainer.py

The model is t5-v1_1-small in fp32 on a CPU, with the same weights, data and schedule for all sides, and T5's usual
lengths. Each side is a process. The sides take turns after every step, so that changes of the machine's speed affect
all of them. A ratio is the median of the ratios of neighboring steps.

Without dropout the losses of all steps must agree; otherwise no time is reported. With dropout, as T5 is trained, the
dropout masks differ. The ReLU of T5 1.0 is not suitable for the comparison: near zero, rounding decides whether a unit
is active, and then its gradient differs.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for all sides

import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table

import shardzoo
from shardzoo.trainer import Trainer, TrainingArguments
from shardzoo.trainer.logging.reporter import SilentReporter

SIDES = ("transformers", "ours, their model", "ours, our model")
T5_V1_1_SMALL = {
    "vocab_size": 32128, "d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
}  # fmt: skip
UNTIMED = 3  # steps at the beginning, during which other sides are still starting
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    steps: int = 50
    batch_size: int = 2
    length: int = 512
    """Source tokens; there are a quarter as many target tokens."""
    dropouts: tuple[float, ...] = (0.0, 0.1)
    threads: int = 2
    json: Path | None = None
    """Where to write the figures."""


class Samples:
    """An endless dataset of source tokens and a quarter as many targets; sample i is a function of i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, T5_V1_1_SMALL["vocab_size"], (self.length,), generator=generator)
        return {"input_ids": ids, "labels": ids[: self.length // 4]}


class Turns(SilentReporter):
    """Waits for this side's turn before each step except the first, and records each step's loss and seconds."""

    def __init__(self, own: Any, following: Any, steps: int) -> None:
        self.own, self.following, self.steps = own, following, steps
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.started = time.perf_counter()

    def training(self, step: int, values: dict[str, float]) -> None:
        self.losses.append(values["loss"])
        self.seconds.append(time.perf_counter() - self.started)
        if step > 1:
            self.following.release()
        if step < self.steps:
            self.own.acquire()
        self.started = time.perf_counter()


def ours(kind: Any, clock: Turns, data: Samples, folder: str, arguments: Arguments) -> None:
    settings = TrainingArguments(
        train_steps=arguments.steps, micro_batch_size=arguments.batch_size, lr=1e-4, lr_schedule="linear",
        warmup_steps=0, weight_decay=0.0, log_interval=1, save_interval=1 << 30, save_dir=f"{folder}/{os.getpid()}",
    )  # fmt: skip
    model = kind.from_pretrained(f"{folder}/model")
    Trainer(settings).train(model, train_dataset=data, reporter=clock)


def theirs(clock: Turns, data: Samples, folder: str, arguments: Arguments) -> None:
    class Ends(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                clock.training(state.global_step, {"loss": float(logs["loss"])})

    class InOrder(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return (data[i] for i in range(arguments.steps * arguments.batch_size))

    settings = transformers.TrainingArguments(
        output_dir=f"{folder}/{os.getpid()}", max_steps=arguments.steps, logging_steps=1, save_strategy="no",
        per_device_train_batch_size=arguments.batch_size, learning_rate=1e-4, lr_scheduler_type="linear",
        weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused", report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration.from_pretrained(f"{folder}/model")
    trainer = transformers.Trainer(model, settings, train_dataset=InOrder(), callbacks=[Ends()])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def take_part(side: int, turns: list[Any], results: Any, folder: str, arguments: Arguments) -> None:
    quiet()
    torch.set_num_threads(arguments.threads)
    clock = Turns(turns[side], turns[(side + 1) % len(SIDES)], arguments.steps)
    data = Samples(arguments.length)
    if SIDES[side] == "transformers":
        theirs(clock, data, folder, arguments)
    else:
        kind: Any = (
            shardzoo
            if SIDES[side] == "ours, our model"
            else transformers.T5ForConditionalGeneration
        )
        ours(kind, clock, data, folder, arguments)
    results.put((SIDES[side], clock.losses, clock.seconds))


def race(arguments: Arguments, dropout: float) -> dict[str, float]:
    """Returns the median seconds of a step for each side, and the median ratios of speed.

    Raises:
        RuntimeError: A process failed, or the losses without dropout differ.
    """
    context = multiprocessing.get_context("spawn")
    turns, results = (
        [context.Semaphore(int(side == 0)) for side in range(len(SIDES))],
        context.Queue(),
    )
    losses, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = transformers.T5Config(**T5_V1_1_SMALL, dropout_rate=dropout)
        transformers.T5ForConditionalGeneration(config).save_pretrained(f"{folder}/model")
        processes = [
            context.Process(
                target=take_part,
                name=name,
                args=(side, turns, results, folder, arguments),
                daemon=True,
            )
            for side, name in enumerate(SIDES)
        ]
        for process in processes:
            process.start()
        while len(losses) < len(SIDES):
            if failed := [process.name for process in processes if process.exitcode]:
                raise RuntimeError(f"{', '.join(failed)} failed; its error is printed above")
            with contextlib.suppress(queue.Empty):
                side, losses[side], seconds[side] = results.get(timeout=1)
        for process in processes:
            process.join()
    found = {
        f"{side}, seconds": statistics.median(values[UNTIMED:]) for side, values in seconds.items()
    }
    for side in SIDES[1:]:
        if not dropout:
            differences = [
                abs(own - other) for own, other in zip(losses[SIDES[0]], losses[side], strict=True)
            ]
            if not all(difference <= TOLERANCE for difference in differences):
                raise RuntimeError(f"{side}: the losses differ by {max(differences):.1e}")
            found[f"{side}, largest difference of a loss"] = max(differences)
        neighbors = zip(seconds[SIDES[0]][UNTIMED:], seconds[side][UNTIMED:], strict=True)
        found[f"{side}, ratio"] = statistics.median(other / own for other, own in neighbors)
    return found


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    quiet()
    found = {f"dropout {dropout}": race(arguments, dropout) for dropout in arguments.dropouts}
    for name, values in found.items():
        table = Table(title=name, title_justify="left", show_header=False)
        for label, value in sorted(values.items()):
            table.add_row(label, f"{value:.4g}")
        Console().print(table)
    if arguments.json:
        settings = {"threads": arguments.threads, "steps": arguments.steps}
        arguments.json.write_text(json.dumps({**settings, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
