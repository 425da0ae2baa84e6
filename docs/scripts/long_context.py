"""Draws the picture of docs/long-context.md from what benchmarks/context.py has measured.

python docs/scripts/long_context.py [RESULTS] [PICTURE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/context_cpu.json"
PICTURE = ROOT / "docs/pictures/long_context.png"
COLORS = {1: "#1b1b1b", 2: "#219ebc", 4: "#fb8500"}
STYLES = {"none": "-", "full": ":"}
LABELS = {"none": "", "full": ", blocks recomputed"}


def main() -> None:
    given = [Path(name) for name in sys.argv[1:]]
    results = given[0] if given else RESULTS
    picture = given[1] if len(given) > 1 else PICTURE
    runs = json.loads(results.read_text())["results"]
    lengths = sorted({run["length"] for run in runs})
    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for recompute, style in STYLES.items():
        for context, color in COLORS.items():
            own = [
                run for run in runs if (run["recompute"], run["context"]) == (recompute, context)
            ]
            if len(own) < 2:
                continue  # no line
            own.sort(key=lambda run: run["length"])
            axes.plot(
                [run["length"] for run in own],
                [run["gib"] for run in own],
                color=color,
                linestyle=style,
                marker="o",
                label=f"{context} rank{'s' if context > 1 else ''}{LABELS[recompute]}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("source positions")
    axes.set_ylabel("GiB of a rank's step")
    axes.set_title("T5 of 4 + 4 layers of width 512, fp32, heads exchanged")
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(picture, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
