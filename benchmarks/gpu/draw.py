"""Draws how fast training steps are on a GPU beside transformers', from the reports of benchmarks/gpu.sh.

    python benchmarks/gpu/draw.py benchmarks/results/gpu_h200_first.json benchmarks/results/gpu_h200_second.json \
        --plot docs/curves/gpu_steps.png

If several reports are given, a row of a later one replaces that of an earlier one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

THEIRS, OURS = "transformers, SDPA", "shardzoo"
MODES = {"none": "without dropout", "as published": "with the published dropout"}
COLORS = {"none": "tab:blue", "as published": "tab:orange"}
NAMES = {
    "gpt2-medium": "GPT-2 medium, 16 × 1,024",
    "gpt2-xl": "GPT-2 XL, 8 × 1,024",
    "llama-1b": "Llama 1B, 4 × 2,048",
    "olmoe": "OLMoE, 4 layers, 8 × 1,024",
    "bert-large": "BERT-large, 32 × 512",
    "t5-large": "T5-large, 16 × (512 + 128)",
    "nanot5": "T5-v1.1-base, 128 × (512 + 128)",
    "t5-padded": "T5-base, 32 × (512 + 128), padded",
    "libai": "LiBai's mT5, 16 × (512 + 128), TF32",
    "gpt2-64": "GPT-2 small, 1 × 64",
    "t5-64": "T5-base, 1 × (64 + 64)",
}
COVER = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # of the line at 1
Milliseconds = dict[tuple[str, str, str], float]


def read(paths: Sequence[Path]) -> tuple[str, Milliseconds]:
    """Returns the GPU's name, and milliseconds by workload, side and dropout."""
    gpu, found = "", Milliseconds()
    for path in paths:
        report: dict[str, Any] = json.loads(path.read_text())
        gpu = report["machine"]["GPU"]
        for name in NAMES:
            for table in report["figures"].get(f"steps_{name}", {}).get("tables", [])[:1]:
                for side, mode, cell, *_ in table["rows"]:
                    if cell.replace(".", "", 1).isdigit():
                        found[name, side, mode] = float(cell)
    return gpu, found


def draw(axes: Axes, milliseconds: Milliseconds) -> None:
    """Draws a pair of bars for each workload: transformers' time divided by ours."""
    names = [name for name in NAMES if (name, OURS, "none") in milliseconds]
    for at, name in enumerate(reversed(names)):
        for mode, offset in (("none", 0.19), ("as published", -0.19)):
            if not {(name, THEIRS, mode), (name, OURS, mode)} <= milliseconds.keys():
                continue
            theirs, ours = milliseconds[name, THEIRS, mode], milliseconds[name, OURS, mode]
            axes.barh(at + offset, theirs / ours, 0.36, color=COLORS[mode], label=MODES[mode])
            text = f"{theirs / ours:.2f} ×  ({theirs:.0f} → {ours:.0f} ms)"
            axes.text(
                theirs / ours + 0.03, at + offset, text, va="center", fontsize=8.5, bbox=COVER
            )
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set_yticks(range(len(names)), [NAMES[name] for name in reversed(names)])
    axes.set_xlabel("times as fast as transformers with SDPA")
    axes.set_xlim(0, 4.1)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), loc="lower right", frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path, required=True)
    options = parser.parse_args()
    gpu, milliseconds = read(options.reports)
    figure = Figure(figsize=(10, 5.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"Training steps on one {gpu.removeprefix('NVIDIA ')}, bf16 but for LiBai's")
    draw(axes, milliseconds)
    figure.savefig(options.plot, dpi=90)
    return 0


if __name__ == "__main__":
    sys.exit(main())
