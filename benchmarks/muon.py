"""Trains a quickstart with AdamW, and with Muon in fewer steps, and compares their losses on held-out text.

    python benchmarks/muon.py --steps 1400 --share 0.75 --seeds 1 2 3

Each run has its own warm-up and decay to a tenth of the rate, in the number of steps that it takes. Both optimizers
have the recipe's rate and weight decay, the same text and the same held-out part of it. The command exits with 1 if
Muon has not reached AdamW's loss for each seed. `--model-parallel-size 2` trains over two processes, as the quickstart
does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

PRETRAIN = Path(__file__).parents[1] / "pretrain.py"


@dataclass(frozen=True)
class Arguments:
    """What to train, and for how long."""

    model: str = "gpt2-quickstart"
    steps: int = 1400
    """AdamW's."""
    share: float = 0.75
    """Muon's part of them."""
    seeds: tuple[int, ...] = (1, 2, 3)
    warmup: float = 1 / 14
    """Share of a run's steps, the recipe's."""
    model_parallel_size: int = 1
    settings: tuple[str, ...] = ()
    """Further arguments of both runs, such as `lr=2e-3`."""
    json: Path | None = None
    """Where to write the figures."""


def train(arguments: Arguments, optimizer: str, seed: int, steps: int, folder: Path) -> float:
    """Returns the loss of all held-out samples after a run of `pretrain.py`."""
    command = [
        sys.executable,
        str(PRETRAIN),
        f"--model={arguments.model}",
        f"--output-dir={folder}",
        f"--model-parallel-size={arguments.model_parallel_size}",
        f"optimizer={optimizer}",
        f"seed={seed}",
        f"train_steps={steps}",
        f"warmup_steps={round(arguments.warmup * steps)}",
        f"eval_interval={steps}",
        f"save_interval={steps}",
        *arguments.settings,
    ]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, env=os.environ, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}; see {log.name}")
    losses: list[float] = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "final/loss" in record:
            losses.append(record["final/loss"])
    return losses[-1]


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    work = Path(tempfile.mkdtemp(prefix="muon-"))
    fewer = int(arguments.share * arguments.steps)
    print(f"{arguments.model}: {arguments.steps} steps of AdamW, {fewer} of Muon", flush=True)
    rows = []
    for seed in arguments.seeds:
        started = time.monotonic()
        adamw = train(arguments, "adamw", seed, arguments.steps, work / f"adamw-{seed}")
        middle = time.monotonic()
        muon = train(arguments, "muon", seed, fewer, work / f"muon-{seed}")
        end = time.monotonic()
        rows.append({"seed": seed, "adamw": adamw, "muon": muon})
        print(
            f"seed {seed}: AdamW {adamw:.4f} in {middle - started:.0f} s, "
            f"Muon {muon:.4f} in {end - middle:.0f} s",
            flush=True,
        )
        if arguments.json:
            report = {
                "model": arguments.model,
                "settings": arguments.settings,
                "steps": {"adamw": arguments.steps, "muon": fewer},
                "losses": rows,
            }
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(row["muon"] > row["adamw"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
