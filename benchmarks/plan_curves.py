"""Plans models on 8 to 10,240 devices, simulates the first layout of each, and draws the curves of docs/scale.md.

    python benchmarks/plan_curves.py [--device h100] [--output docs/curves/scale.png]

The global batch stays the same, so this is strong scaling: with more devices each has less to do.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from shardzoo.models import find_config
from shardzoo.models.config import ModelConfig
from shardzoo.plan import Cluster, find_cluster
from shardzoo.plan.layouts import PlanRequest, build_network, find_plans, save_seconds
from shardzoo.plan.simulate import Failures, Stragglers, forecast_run, simulate_step

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 5120, 10_240)
DRAWS = 8
SHOWN = (8, 64, 512, 2048, 10_240)  # in the table
BATCH, TOKENS = 5120, 300e9
MTBF, RESTART = 50_000 * 3600.0, 600.0
STRAGGLERS = Stragglers(slow_share=0.001, slowdown=1.2, jitter=0.03)


def models() -> dict[str, tuple[ModelConfig, int]]:
    """Returns configurations and lengths; of the encoder-decoders, of source and target each."""
    wide = find_config("gpt2").with_changes(
        n_embd=10_240, n_head=80, n_layer=80, vocab_size=50_304, n_positions=2048
    )
    return {
        "GLM-10B": (find_config("glm-10b"), 1024),
        "T5-11B": (find_config("t5-11b"), 512),
        "mT5-XXL": (find_config("mt5-xxl"), 1024),
        "100B decoder": (wide, 2048),
    }


def planned(
    config: ModelConfig, length: int, devices: int, cluster: Cluster
) -> dict[str, Any] | None:
    """Returns the fastest layout with its simulation, or None if none fits."""
    asked = PlanRequest(devices, BATCH, length, length)
    found = find_plans(config, asked, cluster, best=1)
    if not found:
        return None
    (first,) = found
    run, network = first.run, build_network(config)
    steps = [
        simulate_step(network, run, cluster, stragglers=STRAGGLERS, seed=seed)
        for seed in range(DRAWS)
    ]
    step = sum(steps) / DRAWS
    work = TOKENS / (BATCH * length) * step
    save = save_seconds(config, run, asked)
    whole = forecast_run(Failures(MTBF, save, RESTART), devices, work)
    return {
        "layout": f"{run.tensor} × {run.pipeline} × {run.data}",
        "MFU": first.mfu(cluster),
        "stragglers": first.time.total / step,
        "useful": work / whole.seconds,
        "days": whole.seconds / 86400,
        "save": save,
        "interval": whole.interval / 60,
    }


def table(curves: dict[str, dict[int, dict[str, Any] | None]]) -> str:
    lines = [
        "| model | devices | TP × PP × DP | MFU | speed with stragglers | save | every | useful time | days |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, curve in curves.items():
        for devices in SHOWN:
            row = curve[devices]
            cells = (
                ["does not fit", *[""] * 6]
                if row is None
                else [row["layout"], f"{row['MFU']:.0%}", f"{row['stragglers']:.0%}", f"{row['save']:.1f} s",
                      f"{row['interval']:,.0f} min", f"{row['useful']:.1%}", f"{row['days']:,.1f}"]
            )  # fmt: skip
            lines.append(f"| {name} | {devices:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(curves: dict[str, dict[int, dict[str, Any] | None]], device: str, path: Path) -> None:
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, curve in curves.items():
        fitting = {devices: row for devices, row in curve.items() if row}
        rows = fitting.values()
        kept = [100 * row["useful"] * row["stragglers"] for row in rows]
        left.plot([*fitting], [100 * row["MFU"] for row in rows], "o-", label=name)
        middle.plot([*fitting], [row["days"] for row in rows], "o-", label=name)
        right.plot([*fitting], kept, "o-", label=name)
    left.set(title="MFU of the fastest layout", ylabel="% of the peak arithmetic", ylim=(0, None))
    middle.set(title="Time for 300 billion tokens", ylabel="days", yscale="log")
    right.set(title="Speed left by stragglers and failures", ylabel="%")
    middle.yaxis.set_major_formatter("{x:,g}")
    for axes in (left, middle, right):
        axes.set(xlabel=f"devices ({device.upper()})", xscale="log")
        axes.set_xticks(DEVICES[::2], [f"{devices:,}" for devices in DEVICES[::2]])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    left.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw the fastest layouts of four models over the number of devices."
    )
    parser.add_argument(
        "--device", default="a100", help="a100, h100, … or a YAML file, as of `shardzoo plan`"
    )
    parser.add_argument("--output", type=Path, help="also draw the curves into this file")
    arguments = parser.parse_args()
    cluster = find_cluster(arguments.device)
    curves = {
        name: {devices: planned(config, length, devices, cluster) for devices in DEVICES}
        for name, (config, length) in models().items()
    }
    print(table(curves))
    if arguments.output:
        draw(curves, arguments.device, arguments.output)


if __name__ == "__main__":
    main()
