"""Evaluations on the way, and the best checkpoint: the same whether a run was stopped in between or not."""

from __future__ import annotations

import json
import math
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from every_case import by_turns
from training import Pairs, Stream, losses, run_training, tiny_t5

from shardzoo.trainer import Trainer

SETTINGS = {
    "eval_interval": 3,
    "save_best": "loss",
    "log_interval": 1,
    "micro_batch_size": 2,
    "lr": 1e-2,
}


def train(folder: Path, data=None, **arguments) -> dict[str, float]:
    trainer = Trainer(save_dir=str(folder), **{**SETTINGS, **arguments})
    return trainer.train(
        tiny_t5(), train_dataset=Pairs(40) if data is None else data, valid_dataset=Pairs(8)
    )


def evaluations(folder: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{"step": r["step"], "loss": r["valid/loss"]} for r in records if "valid/loss" in r]


def state(folder: Path, step: int) -> dict:
    return json.loads((folder / f"checkpoints/step-{step:06d}/trainer_state.json").read_text())


def best(folder: Path) -> str:
    return (folder / "checkpoints" / "best").read_text().strip()


class Stopping(Pairs):
    """Asks the run to stop while it reads the samples of a step."""

    def __init__(self, step: int) -> None:
        super().__init__(40)
        self.step, self.reads = step, 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads += 1
        if self.reads == 2 * self.step:
            signal.raise_signal(signal.SIGTERM)
        return super().__getitem__(index)


@pytest.mark.parametrize("stopped_at", by_turns([3, 4, 7], 3))
def test_a_stopped_run_evaluates_what_a_whole_one_does(tmp_path, stopped_at):
    """Also the step at which it was stopped, and the last one."""
    arguments = {"train_steps": 7, "save_interval": 7}
    values = train(tmp_path / "whole", **arguments)
    with pytest.raises(SystemExit):
        train(tmp_path / "stopped", Stopping(stopped_at), resume=True, **arguments)
    assert train(tmp_path / "stopped", resume=True, **arguments) == values
    assert evaluations(tmp_path / "stopped") == evaluations(tmp_path / "whole")
    assert [e["step"] for e in evaluations(tmp_path / "whole")] == [3, 6, 7]
    assert best(tmp_path / "stopped") == best(tmp_path / "whole") == "step-000007"
    assert state(tmp_path / "stopped", 7) == state(tmp_path / "whole", 7)


@pytest.mark.before_release
def test_a_step_that_turns_out_best_after_the_run_went_on_is_kept(tmp_path):
    """The rate is so high that every later step is worse."""
    arguments = {
        "train_steps": 7,
        "save_interval": 5,
        "save_total_limit": 1,
        "lr": 5.0,
        "warmup_steps": 4,
    }
    train(tmp_path / "whole", **arguments)
    assert best(tmp_path / "whole") == "step-000003"
    with pytest.raises(SystemExit):
        train(tmp_path / "stopped", Stopping(3), resume=True, **arguments)
    assert not (tmp_path / "stopped/checkpoints/best").exists()
    train(tmp_path / "stopped", resume=True, **arguments)
    assert best(tmp_path / "stopped") == "step-000003"
    kept = sorted(path.name for path in (tmp_path / "stopped/checkpoints").iterdir())
    assert kept == ["best", "step-000003", "step-000007"]
    steps, _ = run_training(
        None, tmp_path / "on", load_dir=str(tmp_path / "stopped"), load_type="best", train_steps=5
    )
    assert [step["step"] for step in steps] == [4, 5]


def test_the_last_step_is_named_best_where_the_data_s_end_was_not_known(tmp_path):
    """It is saved before anything says that it is the last."""
    arguments = {"epochs": 1, "lr_schedule": "constant", "save_interval": 2, "eval_interval": 100}
    values = train(tmp_path, Stream(Pairs(8)), **arguments)
    assert values["step"] == 4
    assert best(tmp_path) == "step-000004"
    saved = state(tmp_path, 4)
    assert saved["best"] == {"name": "loss", "step": 4, "value": values["loss"]}
    assert saved["validation"] == values
    # The state is still whole, so that the run can go on.
    again = train(tmp_path, Stream(Pairs(8)), resume=True, **{**arguments, "epochs": 2})
    assert again["step"] == 8
    assert len(evaluations(tmp_path)) == 2


def test_a_finished_run_is_not_evaluated_again(tmp_path):
    values = train(tmp_path, train_steps=4)
    assert train(tmp_path, train_steps=4, resume=True) == values
    assert len(evaluations(tmp_path)) == 2


def test_a_run_that_only_takes_a_finished_one_over_is_saved(tmp_path):
    values = train(tmp_path / "first", train_steps=4)
    assert train(tmp_path / "second", train_steps=4, load_dir=str(tmp_path / "first")) == values
    first, second = state(tmp_path / "first", 4), state(tmp_path / "second", 4)
    assert second["files"] == first["files"]
    assert second["best"] == {}  # that of the first folder is not in this one


class Noisy(Pairs):
    """Samples that are drawn from the process's generator."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        torch.rand(3), random.random(), np.random.rand()
        return super().__getitem__(index)


@pytest.mark.parametrize("interval", [1, 2, 100])
def test_evaluations_change_nothing_of_training(tmp_path, interval):
    """Though the validation data draws from the generators that dropout draws from."""
    settings = {"data": Noisy(40), "dropout": 0.1, "train_steps": 4}
    alone, _ = run_training(None, tmp_path / "alone", **settings)
    steps, _ = run_training(
        None, tmp_path / "both", valid=Noisy(8), eval_interval=interval, **settings
    )
    assert losses(steps) == losses(alone)


def test_a_failing_evaluation_at_the_end_leaves_what_was_trained(tmp_path):
    def broken(logits, labels):
        raise RuntimeError("no such metric")

    trainer = Trainer(save_dir=str(tmp_path), train_steps=3, lr=1e-2)
    with pytest.raises(RuntimeError, match="no such metric"):
        trainer.train(tiny_t5(), None, None, Pairs(40), Pairs(8), {"broken": broken})
    assert state(tmp_path, 3)["validation"] == {}
    values = Trainer(save_dir=str(tmp_path), train_steps=3, lr=1e-2, resume=True).train(
        tiny_t5(), train_dataset=Pairs(40), valid_dataset=Pairs(8)
    )
    assert state(tmp_path, 3)["validation"] == values


def test_another_save_best_begins_its_own_comparison(tmp_path):
    train(tmp_path, train_steps=3, save_interval=3)
    metrics = {"rows": lambda logits, labels: -1.0}
    settings = {
        **SETTINGS,
        "save_best": "rows",
        "train_steps": 6,
        "save_total_limit": 1,
        "resume": True,
    }
    Trainer(save_dir=str(tmp_path), **settings).train(
        tiny_t5(), None, None, Pairs(40), Pairs(8), metrics
    )
    assert state(tmp_path, 6)["best"] == {"name": "rows", "value": -1.0, "step": 6}
    assert best(tmp_path) == "step-000006"


def test_what_is_not_a_number_is_never_the_best(tmp_path):
    values = iter([math.nan, 2.0, math.nan, 1.0])

    class Measured(Trainer):
        def validate(self, *arguments):
            return {"score": next(values)}

    trainer = Measured(
        save_dir=str(tmp_path),
        train_steps=4,
        **{**SETTINGS, "eval_interval": 1, "save_best": "score"},
    )
    trainer.train(tiny_t5(), train_dataset=Pairs(40), valid_dataset=Pairs(8))
    assert best(tmp_path) == "step-000002"
    assert state(tmp_path, 4)["best"] == {"name": "score", "value": 2.0, "step": 2}
