"""Ends processes of a pretraining run with SIGKILL at random moments, and compares it with a run that was left alone.

A kill takes one rank of the job: before the first step, while it trains, or while it saves. The rest must end within
`--limit` seconds. Then the same command goes on. Every step must have the loss of the undisturbed run, and the last
checkpoint its bytes.

python benchmarks/kills.py --kills 10 --layout pp=2 model_parallel_size=2
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

PRETRAIN = Path(__file__).parents[1] / "pretrain.py"
MODEL = "hidden_size=48 num_hidden_layers=2 sequence_length=32 vocab_size=300 micro_batch_size=2 eval_sequences=4"
RUN = "gradient_accumulation_steps=2 warmup_steps=2 final_eval_sequences=4 held_out_fraction=0.3"
PHASES = ("preparing", "training", "saving")


@dataclass(frozen=True)
class Arguments:
    """What to train, and how often to end it."""

    layout: tuple[str, ...] = ("pp=2", "model_parallel_size=2")
    """Arguments of `pretrain.py`."""
    kills: int = 10
    steps: int = 60
    limit: float = 10.0
    """Seconds after which no process of a job may be left."""
    seed: int = 0


class Job:
    """`pretrain.py` in a folder, as a user starts it."""

    def __init__(self, arguments: Arguments, texts: Path, folder: Path) -> None:
        self.folder, words = folder, [*MODEL.split(), *RUN.split(), *arguments.layout]
        resume = ["--resume"] if [*folder.glob("checkpoints/step-*")] else ["--overwrite"]
        command = [
            sys.executable,
            str(PRETRAIN),
            "--data",
            str(texts),
            "--output-dir",
            str(folder),
            *words,
            *resume,
        ]
        command += [f"train_steps={arguments.steps}", "save_interval=4", "log_interval=1"]
        self.log = (folder.parent / f"{folder.name}.log").open("a")
        self.process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=self.log, stderr=self.log
        )

    def losses(self) -> list[tuple[int, float]]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [
            (record["step"], record["train/loss"]) for record in records if "train/loss" in record
        ]

    def wait(self, phase: str, generator: random.Random, preparation: float) -> None:
        """Waits for a random moment of a phase, or for the end of the job."""
        if phase == "preparing":
            time.sleep(generator.uniform(0.0, preparation))
            return
        before = len(self.losses())
        while self.process.poll() is None and len(self.losses()) == before:
            time.sleep(0.02)
        if phase == "training":
            time.sleep(generator.uniform(0.0, 3.0))
            return
        while self.process.poll() is None and not [*self.folder.glob("checkpoints/.*.partial")]:
            time.sleep(0.001)
        time.sleep(generator.uniform(0.0, 0.02))

    def kill(self, generator: random.Random, limit: float) -> tuple[int, float]:
        """Kills one of the processes; returns which one, and how long the others lived."""
        launcher = psutil.Process(self.process.pid)
        family = launcher.children(recursive=True)
        ranks = launcher.children() or [launcher]
        victim = generator.randrange(len(ranks))
        started = time.monotonic()
        ranks[victim].kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit)
        _, alive = psutil.wait_procs(family, timeout=1.0)
        if alive or not self.process.returncode:
            raise SystemExit(
                f"{len(alive)} processes were left after {limit} s: {alive}; see {self.log.name}"
            )
        return victim, time.monotonic() - started


def checkpoint(folder: Path, step: int) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted((folder / "checkpoints" / f"step-{step:06d}").iterdir())
    }


def finish(arguments: Arguments, texts: Path, folder: Path) -> tuple[Job, float]:
    """Lets a run end; returns it, and the seconds before its first step."""
    started, job = time.monotonic(), Job(arguments, texts, folder)
    before, preparation = len(job.losses()), 0.0
    while job.process.poll() is None:
        if not preparation and len(job.losses()) > before:
            preparation = time.monotonic() - started
        time.sleep(0.05)
    if job.process.returncode:
        raise SystemExit(f"exit code {job.process.returncode}; see {job.log.name}")
    return job, preparation


def main(arguments: Arguments) -> None:
    generator, work = random.Random(arguments.seed), Path(tempfile.mkdtemp(prefix="kills-"))
    texts = work / "texts"
    texts.mkdir()
    for i in range(12):
        lines = [f"def function_{i}_{j}(value):\n    return value + {j}\n\n" for j in range(40)]
        (texts / f"{i}.txt").write_text("".join(lines))
    whole, preparation = finish(arguments, texts, work / "whole")
    print(f"undisturbed: {preparation:.1f} s before the first step; logs in {work}", flush=True)
    done = 0
    while done < arguments.kills:
        phase, job = PHASES[done % len(PHASES)], Job(arguments, texts, work / "killed")
        job.wait(phase, generator, preparation)
        if job.process.poll() is not None:
            raise SystemExit(
                f"the run ended before kill {done + 1}; use more than {arguments.steps} steps"
            )
        rank, seconds = job.kill(generator, arguments.limit)
        done, step = done + 1, max(job.losses(), default=(0, 0.0))[0]
        code = job.process.returncode
        print(
            f"kill {done:2} {phase:9} rank {rank} after step {step:3}: exit code {code} in {seconds:.1f} s",
            flush=True,
        )
    killed, _ = finish(arguments, texts, work / "killed")
    expected = dict(whole.losses())
    assert sorted(expected) == list(range(1, arguments.steps + 1))
    assert {step for step, _ in killed.losses()} == set(expected)
    assert all(loss == expected[step] for step, loss in killed.losses()), "a loss differs"
    first, second = (checkpoint(job.folder, arguments.steps) for job in (whole, killed))
    differing = sorted(
        name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
    )
    print(
        f"{len(killed.losses())} losses equal; of {len(first)} files of the last checkpoint differ: {differing}"
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments))
