"""Runs the whole parity matrix, prints it as a table, and renews the table of docs/models.md.

    python tests/zoo/table.py [PART OF A NAME …]     # only the cases whose family or name has one of these parts
    python tests/zoo/table.py --write [--jobs 2]     # all cases; replaces the table in docs/models.md
    python tests/zoo/table.py --write mixtral        # replaces the rows of these cases, and adds missing ones

Each row is printed when its case is done; what is wrong with a case is written to stderr. The exit code is 1 if a case
fails, and then nothing is replaced.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.util import Finalize
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
import transformers
from matrix import Case, Figures, architecture_of, check_case, list_sizes, load_rows, show_sizes
from rank_pool import RankPools

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- begin: python tests/zoo/table.py --write -->\n", "<!-- end -->\n"
PATIENCE = 900.0  # seconds for all comparisons of a layout, also on a busy machine
COLUMNS = (
    "family", "architecture", "TP x EP", "plain", "SP", "recompute", "dropout", "outputs", "gradients", "bf16",
    "tokens", "convert",
)  # fmt: skip
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def line(name: str, family_name: str, case: Case, figures: Figures) -> str:
    """One row of the table. A cell is "no" if something is wrong with what it stands for."""

    def works(*words: str) -> str:
        return (
            "no"
            if any(word in problem for problem in figures.problems for word in words)
            else "yes"
        )

    cells = [
        *title(name, family_name),
        " ".join(show_sizes(*sizes) for sizes in list_sizes(name, (family_name, case))),
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


def title(name: str, family_name: str) -> tuple[str, str]:
    """The first two cells of a row."""
    return (
        f"`{family_name}`",
        f"`{architecture_of(name)}`{name.removeprefix(architecture_of(name))}",
    )


@functools.cache
def pools() -> RankPools:
    """Of this process, for all its cases."""
    made = RankPools()
    # Between two cases the workers are stopped, and a stopped one does not end with this process.
    Finalize(None, made.close, exitpriority=1)
    return made


def compare(name: str) -> tuple[str, list[str]]:
    """Runs a case in this process. Returns its row and what is wrong with it."""
    family_name, case = load_rows()[name]
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_mesh = functools.partial(pools().run_mesh, timeout=PATIENCE)
            figures = check_case(name, (family_name, case), Path(folder), run_mesh)
        except Exception as error:  # the other cases are still of interest
            figures = Figures(
                problems=[f"TP, plain, sequence parallel, recompute, split and merge: {error}"]
            )
    return line(name, family_name, case, figures), figures.problems


def caption(names: list[str]) -> str:
    architectures = len({architecture_of(name) for name in names})
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{len(names)} cases of {architectures} architectures, with {versions}:"


def write(names: list[str], rows: list[str]) -> None:
    """Replaces what docs/models.md has between the two comments."""
    table = "\n".join(["", caption(names), "", HEADER, *rows, ""])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{rest.partition(END)[2]}")


def written() -> tuple[int, int, list[list[str]]]:
    """The numbers of cases and architectures that docs/models.md names, and the cells of each row of its table."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    numbers = re.search(r"^(\d+) cases of (\d+) architectures", table, re.MULTILINE)
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| `")]
    return (int(numbers[1]), int(numbers[2]), rows) if numbers else (0, 0, rows)


def merge(renewed: dict[str, str]) -> tuple[list[str], list[str]]:
    """Returns names and rows of the whole table: the given ones, and those that docs/models.md has of other cases."""
    kept = {tuple(row[:2]): f"| {' | '.join(row)} |" for row in written()[2]}
    rows = {
        name: renewed.get(name, kept.get(title(name, family_name), ""))
        for name, (family_name, _) in load_rows().items()
    }
    rows = {name: row for name, row in rows.items() if row}
    return list(rows), list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="of the name of a case or its family"
    )
    parser.add_argument(
        "--write", action="store_true", help="replace the rows of these cases in docs/models.md"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="cases at a time; each takes up to four processes"
    )
    options = parser.parse_args()
    names = [
        name for name, (family_name, _) in load_rows().items()
        if not options.parts or any(part == family_name or part in name for part in options.parts)
    ]  # fmt: skip
    start, rows, failures = time.monotonic(), [], 0
    print(HEADER, flush=True)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as executor:
        for name, (row, problems) in zip(names, executor.map(compare, names), strict=True):
            rows.append(row)
            failures += bool(problems)
            print(row, flush=True)
            print(
                *(f"{name}: {problem}\n" for problem in problems),
                sep="",
                end="",
                file=sys.stderr,
                flush=True,
            )
    print(
        f"\n{len(rows)} cases, {failures} failures, {time.monotonic() - start:.0f} s",
        file=sys.stderr,
    )
    if options.write and not failures:
        write(*merge(dict(zip(names, rows, strict=True))))
    return 1 if failures or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
