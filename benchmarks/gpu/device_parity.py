"""Compares every architecture of the zoo on the device with transformers: the matrix of tests/zoo, without splitting.

    python benchmarks/gpu/device_parity.py --device cuda --json FILE

Ours computes on the device in fp32 (TF32 off), with and without dropout, and decodes. What it is compared with computes
on the CPU in fp32: outputs and gradients, tolerances four times those of the tests (tests/harness/matrix.py), and the
same tokens. One architecture of each family is also compared in bf16: its error against fp32 is at most 1.5 times that
of transformers in bf16 on the same device.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")  # several cases share the cores
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "harness"))

import torch
from matrix import check_case, load_rows
from report import save, table

COLUMNS = (
    "family",
    "case",
    "outputs",
    "gradients",
    "bf16 outputs",
    "bf16 gradients",
    "tokens",
    "problems",
)
TINY = ("T5ForConditionalGeneration",)
JOBS = 12  # cases at a time; each process takes half a GiB of the GPU for itself


def compare(name: str, device: str, in_bf16: bool) -> tuple[list[str], list[str]]:
    """Runs a case in this process. Returns its row, and what is wrong with it."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_float32_matmul_precision("highest")
    family_name, case = load_rows()[name]
    if case.obstacle:
        return [family_name, name, "", "", "", "", "", case.obstacle], []
    layouts = [("plain", "fp32"), ("plain", "dropout"), *([("plain", "bf16")] if in_bf16 else [])]
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures = check_case(
                name, (family_name, case), Path(folder), lambda _, run, *given: [run(None, *given)], [(1, 1)], layouts,
                converts=False, device=device,
            )  # fmt: skip
        except Exception as error:  # the other cases are still of interest
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
            return [family_name, name, "", "", "", "", "", problem], [problem]
    narrow = [
        f"{ratio:.2f}" if in_bf16 else "–" for ratio in (figures.bf16_outputs, figures.bf16_grads)
    ]
    problems = "; ".join(figures.problems)
    errors = [f"{figures.outputs:.0e}", f"{figures.grads:.0e}"]
    return [
        family_name,
        name,
        *errors,
        *narrow,
        str(figures.tokens or "–"),
        problems or "none",
    ], figures.problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true", help="one architecture, in this process")
    parser.add_argument("--quick", action="store_true", help="one architecture of each family")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    families = {name: family for name, (family, _) in load_rows().items()}
    first = {family: name for name, family in reversed(families.items())}
    names = [name for name in families if not options.tiny or name in TINY]
    if options.quick:
        names = [name for name in names if options.tiny or first[families[name]] == name]
    # Those that are compared in bf16 take longest.
    names.sort(key=lambda name: first[families[name]] != name)
    began, rows, wrong = time.monotonic(), dict[str, list[str]](), 0

    def note(name: str, row: list[str], problems: list[str]) -> int:
        rows[name] = row
        print(*row, f"{time.monotonic() - began:.0f} s", sep="  ", flush=True)
        title = f"Parity with transformers on the device: {len(rows)} of {len(names)} cases"
        save(options.json, [table(title, COLUMNS, [rows[n] for n in families if n in rows])])
        return bool(problems)

    if options.tiny:
        wrong = sum(note(name, *compare(name, options.device, False)) for name in names)
        return int(wrong > 0)
    with ProcessPoolExecutor(JOBS, get_context("spawn")) as executor:
        waiting = {
            executor.submit(compare, name, options.device, first[families[name]] == name): name
            for name in names
        }
        wrong = sum(note(waiting[done], *done.result()) for done in as_completed(waiting))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
