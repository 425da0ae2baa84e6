"""Runs the whole parity matrix and prints it as the table of docs/models.md.

    python tests/zoo/table.py [PART OF A NAME …]     # only the cases whose family or name has one of these parts

The exit code is 1 if a case fails; what is wrong with it is written to stderr.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
from matrix import Case, Figures, check_case, load_rows
from rank_pool import RankPools

COLUMNS = (
    "family", "architecture", "TP", "plain", "SP", "recompute", "dropout", "outputs", "gradients", "bf16", "tokens",
    "convert",
)  # fmt: skip
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def line(name: str, family_name: str, case: Case, figures: Figures) -> str:
    """One row of the table. A cell is "no" if something is wrong with what it stands for."""

    def works(*words: str) -> str:
        return "no" if any(word in problem for problem in figures.problems for word in words) else "yes"

    cells = [
        f"`{family_name}`",
        f"`{name.partition(',')[0]}`{''.join(name.partition(',')[1:])}",
        " ".join(map(str, case.sizes)),
        *(works(f", {mode}") for mode in ("plain", "sequence parallel")),
        works("recompute"),
        works("dropout") if figures.dropout else "–",
        f"{figures.outputs:.0e}",
        f"{figures.grads:.0e}",
        f"{figures.bf16_outputs:.2f} {figures.bf16_grads:.2f}",
        "no" if works("tokens are") == "no" else str(figures.tokens or "–"),
        works("split and merge", "--round-trip"),
    ]
    return f"| {' | '.join(cells)} |"


def main(parts: list[str]) -> int:
    torch.set_num_threads(1)
    pools, start, failures, lines = RankPools(), time.monotonic(), 0, []
    for name, (family_name, case) in load_rows().items():
        if parts and not any(part in (family_name, name) or part in name for part in parts):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                figures = check_case(name, (family_name, case), Path(folder), pools.run_mesh)
            except Exception as error:  # the other cases are still of interest
                figures = Figures(problems=[f"TP, plain, sequence parallel, recompute, split and merge: {error}"])
        failures += bool(figures.problems)
        for problem in figures.problems:
            print(f"{name}: {problem}", file=sys.stderr)
        lines.append(line(name, family_name, case, figures))
        print(lines[-1], file=sys.stderr)  # progress
    pools.close()
    print(HEADER, *lines, sep="\n")
    print(f"\n{len(lines)} cases, {failures} failures, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 1 if failures or not lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
