"""Compares runs of the trainer on the device with one on the CPU, and a resumed run with an uninterrupted one.

    python benchmarks/gpu/device_training.py --device cuda --json FILE

Twenty steps of a small GPT-2 with dropout, whose masks are the same everywhere. In fp32 without TF32 each loss is
within 1e-4 of the CPU's: sums have another order, __expf rounds differently, and Adam divides small gradients by their
own size, which makes rounding grow from step to step. A resumed run has the same losses to the bit, in fp32 and bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packages import DEEPSPEED, describe, missing
from report import save, table
from train_run import train

COLUMNS = (
    "run",
    "compared with",
    "steps",
    "largest difference",
    "tolerance",
    "last loss",
    "verdict",
)
TOLERANCE = 1e-4  # relative
FUSED_TOLERANCE = 2e-2  # of bf16, whose gradients are rounded less often
HALF = 10  # steps until the checkpoint from which a run resumes
Losses = dict[int, float]


class Comparison:
    """The table of runs; `save` writes it after each of them."""

    def __init__(self, title: str, path: Path) -> None:
        self.title, self.path = title, path
        self.rows: list[list[str]] = []
        self.wrong = False

    def add(self, run: str, other: str, losses: Losses, wanted: Losses, tolerance: float) -> None:
        """Compares the steps of `losses` with the same ones of another run."""
        differences = [
            abs(loss - wanted[step]) / abs(wanted[step]) for step, loss in losses.items()
        ]
        within = bool(differences) and all(difference <= tolerance for difference in differences)
        last = f"{losses[max(losses)]:.6f}" if losses else "none"
        largest = f"{max(differences, default=0.0):.1e}"
        self.note(
            run,
            other,
            str(len(losses)),
            largest,
            f"{tolerance:g}",
            last,
            "same" if within else "DIFFERENT",
        )
        self.wrong |= not within

    def attempt(self, run: str, compare: Callable[[str], None]) -> None:
        """Calls `compare`; a run that fails is noted, and the next ones take place."""
        try:
            compare(run)
        except Exception as error:
            self.note(
                run, "", "", "", "", "", f"{type(error).__name__}: {error}".partition("\n")[0]
            )
            self.wrong = True

    def note(self, *cells: str) -> None:
        self.rows.append(list(cells))
        print(*cells, sep="  ", flush=True)
        save(self.path, [table(self.title, COLUMNS, self.rows)])


def started(tiny: bool, folder: Path, **arguments: Any) -> Losses:
    """Trains in a new process, which starts the other ranks. Raises RuntimeError with the last line of its output."""
    if lacking := missing(DEEPSPEED) if arguments["env_type"].startswith("deepspeed") else []:
        raise RuntimeError(f"{describe(lacking)} missing")
    file = folder.with_suffix(".json")
    words = [
        sys.executable,
        str(Path(__file__).with_name("train_run.py")),
        *(["--tiny"] if tiny else []),
    ]
    words += ["--folder", str(folder), "--losses", str(file), "--arguments", json.dumps(arguments)]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, flush=True)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        raise RuntimeError(f"exit code {done.returncode}: {lines[-1] if lines else 'no output'}")
    return {int(step): loss for step, loss in json.loads(file.read_text()).items()}


def count_waits(tiny: bool, folder: Path, **arguments: Any) -> float:
    """Returns how often the host waited for the GPU in a step of the trainer, and prints where."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            losses = train(tiny, folder, log_interval=100, **arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [
        warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)
    ]
    places = Counter(f"{warning.filename}:{warning.lineno}" for warning in waits)
    for place, count in places.most_common():
        print(f"{count} waits at {place}", flush=True)
    return len(waits) / max(20, len(losses))


def options_of(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--quick", action="store_true", help="fewer runs, in this process alone")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    options = options_of(__doc__ or "")
    device = {"pytorch_device": "cuda:0" if options.device == "cuda" else "cpu"}
    comparison = Comparison("Training on the device", options.json)
    with tempfile.TemporaryDirectory() as name:
        folder, tiny = Path(name), options.tiny
        wanted = train(tiny, folder / "cpu", pytorch_device="cpu")

        def on_device(run: str) -> None:
            comparison.add(run, "CPU", train(tiny, folder / "device", **device), wanted, TOLERANCE)

        def zero(run: str) -> None:
            found = started(tiny, folder / "zero", env_type="deepspeed", zero_stage=1)
            comparison.add(run, "CPU", found, wanted, TOLERANCE)

        def resumed(precision: str, run: str) -> None:
            settings = {**device, "precision": precision}
            whole = train(tiny, folder / f"whole-{precision}", save_interval=HALF, **settings)
            half = folder / f"whole-{precision}" / "checkpoints" / f"step-{HALF:06d}"
            rest = train(tiny, folder / f"rest-{precision}", load_dir=str(half), **settings)
            comparison.add(run, "uninterrupted", rest, whole, 0.0)

        def recorded(run: str) -> None:
            losses = train(tiny, folder / "graph", cuda_graph=True, **device)
            comparison.add(run, "CPU", losses, wanted, TOLERANCE)

        def fused(run: str) -> None:
            settings = {
                **device, "precision": "bf16", "micro_batch_size": 4, "gradient_accumulation_steps": 2,
            }  # fmt: skip
            added = train(tiny, folder / "added", **settings)
            within = train(tiny, folder / "fused", gradient_accumulation_fusion=True, **settings)
            comparison.add(run, "added afterwards", within, added, FUSED_TOLERANCE)

        def waits(run: str) -> None:
            count = count_waits(tiny, folder / "waits", **device)
            allowed = 1.5  # one a step, and those of the first and the last one
            verdict = "same" if count <= allowed else "DIFFERENT"
            comparison.note(run, "one a step", "20", f"{count:.2f}", f"{allowed}", "", verdict)
            comparison.wrong |= count > allowed

        comparison.attempt("device, fp32", on_device)
        comparison.attempt("device, CUDA graph", recorded)
        if options.device == "cuda":
            comparison.attempt("waits of a step", waits)
        comparison.attempt("sums of gradients within products, bf16", fused)
        for precision in ("bf16",) if options.quick else ("fp32", "bf16"):
            comparison.attempt(
                f"resumed, {precision}", lambda run, precision=precision: resumed(precision, run)
            )
        if not options.quick:
            comparison.attempt("ZeRO 1, fp32", zero)
    return int(comparison.wrong)


if __name__ == "__main__":
    sys.exit(main())
