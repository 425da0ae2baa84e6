"""kill -9 at random moments, saving included: the run goes on, and no bit of it differs from one that was left alone.

`SHARDZOO_KILLS=20` kills each kind of run so often; `make test-all` makes do with a few.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from training import Pairs, Stream, native_mixture, native_t5, run_training

KILLS = int(os.environ.get("SHARDZOO_KILLS", "0"))
STEPS = 30 if KILLS else 10
MOST_STEPS = 8  # of a process before it is killed, so that kills come often

RUNS = {
    "pytorch": ({"env_type": "pytorch"}, 1, 1),
    "pytorchDDP": ({"env_type": "pytorchDDP"}, 1, 2),
    "deepspeed": ({"env_type": "deepspeed", "zero_stage": 2}, 1, 2),
    "deepspeed+mpu": ({"env_type": "deepspeed+mpu", "model_parallel_size": 2}, 2, 2),
    "fsdp": ({"env_type": "fsdp", "model_parallel_size": 2}, 2, 2),
    "context": ({"env_type": "deepspeed+mpu", "context_parallel_size": 2}, 1, 1),
    "experts": (
        {"env_type": "deepspeed+mpu", "model_parallel_size": 2, "expert_parallel_size": 2, "zero_stage": 1},
        2,
        1,
    ),
    "experts, DDP": ({"env_type": "pytorchDDP", "expert_parallel_size": 2}, 1, 1),
    "experts, FSDP": ({"env_type": "fsdp", "expert_parallel_size": 2}, 1, 2),
    "pipeline": (
        {
            "env_type": "deepspeed+mpu",
            "model_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "global_batch_size": 8,
        },
        2,
        1,
    ),
}  # fmt: skip
A_FEW = [
    ("pipeline", "indexed", 1),
    ("context", "indexed", 1),
    ("experts", "indexed", 1),
    ("experts, DDP", "indexed", 1),
    ("experts, FSDP", "streamed", 1),
    ("fsdp", "indexed", 1),
    ("pytorchDDP", "streamed", 2),
]
ALL = [(name, data, KILLS) for name in RUNS for data in ("indexed", "streamed")]


@dataclass(frozen=True)
class Blow:
    """A kill of one rank: after so many steps of a process, at a moment of the next one.

    Attributes:
        victim: The rank.
        steps: How many steps it does before.
        moment: The share of a step's time after them; saves begin at the end of a step.
    """

    victim: int
    steps: int
    moment: float


def train(mesh, folder: Path, *, blow: Blow | None = None, **settings) -> None:
    """Trains and writes every loss to a file, until the blow falls."""
    import torch.distributed as dist

    log = (folder.parent / f"{folder.name}.log").open("a", buffering=1)
    killers = []
    ends = []

    def on_step(step: int, loss: float) -> None:
        if dist.get_rank() == 0:
            log.write(json.dumps([step, loss]) + "\n")
        ends.append(time.monotonic())
        if blow is None or dist.get_rank() != blow.victim or len(ends) != blow.steps:
            return
        seconds = ends[-1] - ends[-2] if len(ends) > 1 else 0.05
        killers.append(
            threading.Timer(blow.moment * seconds, os.kill, (os.getpid(), signal.SIGKILL))
        )
        killers[0].daemon = True
        killers[0].start()

    run_training(
        mesh,
        folder,
        on_step=on_step,
        train_steps=STEPS,
        save_interval=2,
        save_total_limit=2,
        resume=True,
        **settings,
    )
    for killer in killers:
        killer.cancel()


def logged(folder: Path) -> list[tuple[int, float]]:
    return [
        tuple(json.loads(line))
        for line in (folder.parent / f"{folder.name}.log").read_text().splitlines()
    ]


def final_bytes(folder: Path) -> dict[str, bytes]:
    checkpoint = folder / "checkpoints" / f"step-{STEPS:06d}"
    return {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())}


@(pytest.mark.timeout(120 + 90 * KILLS) if KILLS else pytest.mark.before_release)
@pytest.mark.parametrize(("name", "data", "kills"), ALL if KILLS else A_FEW)
def test_killed_runs_equal_whole_ones(run_mesh, tmp_path, name, data, kills):
    arguments, tp, ranks = RUNS[name]
    samples = Pairs(60) if data == "indexed" else Stream(Pairs(60))
    settings = {"data": samples, "dropout": 0.1, **arguments}
    context = arguments.get("context_parallel_size", 1)
    experts = arguments.get("expert_parallel_size", 1)
    if experts > 1:
        settings["model"] = native_mixture
    elif tp > 1 or context > 1:
        settings["model"] = native_t5
    stages = arguments.get("pipeline_parallel_size", 1)
    run = partial(run_mesh, tp, data=ranks, pipeline=stages, context=context, expert=experts)
    run(partial(train, folder=tmp_path / "whole", **settings))
    generator = random.Random(f"{name} {data}")
    done = 0
    while done < kills:
        blow = Blow(
            generator.randrange(tp * ranks * stages * context * experts),
            generator.randrange(1, MOST_STEPS),
            generator.random(),
        )
        try:
            run(partial(train, folder=tmp_path / "killed", blow=blow, **settings))
        except AssertionError as death:
            assert "died with exit code -9" in str(death), death  # noqa: PT017 - any other failure is one
            done += 1
            continue
        # It was done before the blow: another one begins.
        assert_equal(tmp_path / "killed", tmp_path / "whole")
        (tmp_path / "killed.log").unlink()
        shutil.rmtree(tmp_path / "killed")
    run(partial(train, folder=tmp_path / "killed", **settings))
    assert_equal(tmp_path / "killed", tmp_path / "whole")


def assert_equal(killed: Path, whole: Path) -> None:
    """Every step that was done, once or again, had the loss of the whole run, and the last checkpoint its bytes."""
    expected = dict(logged(whole))
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert {step for step, _ in logged(killed)} == set(expected)
    for step, loss in logged(killed):
        assert loss == expected[step], f"the loss of step {step}"
    assert final_bytes(killed) == final_bytes(whole)
