"""Writes the report of a finished run: `report.html`, one page that needs no other file, and a plot
of the loss.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse; margin: 1em 0 }} td, th {{ padding: .15em 1em .15em 0; text-align: left }}
td + td {{ font-variant-numeric: tabular-nums }} svg {{ width: 100%; height: auto }} pre {{ white-space: pre-wrap }}
</style></head><body><h1>{title}</h1>{plots}{caption}{sections}</body></html>
"""
CAPTION = """<p>The pale line is the loss of each logged step, and the full one its running mean. Held-out
samples are never trained on. An evaluation at an interval may take a part of them, and the final one takes
all, so the diamond may lie above or below the line before it.</p>"""
GRADIENT_NORM = "train/grad_norm"
MEAN_SHARE = 1 / 20  # of a run's logged steps, whose mean is its first or last training loss

PALE_BLUE = "#c9d7ea"
BLUE = "#5f8fc9"
DARK_BLUE = "#14365f"
RED = "#b5532a"

Section = str | Mapping[str, Any]  # a text, or the rows of a table: name -> value
Records = list[dict[str, float]]  # of metrics.jsonl


def write_report(
    path: Path,
    records: Records,
    arguments: Mapping[str, Any],
    *,
    title: str,
    sections: Mapping[str, Section] | None = None,
) -> None:
    """Writes the page from the records of `metrics.jsonl` and the run's arguments.

    Args:
        path: The page.
        records: A dict for each line of `metrics.jsonl`.
        arguments: The run's; those that are None are left out.
        title: The heading of the page.
        sections: Heading -> text or table, shown between the results and the arguments.
    """
    parts: dict[str, Section] = {"Results": _summarize(records)}
    load = _list_expert_load(records)
    if load:
        parts["Load of the experts at the last logged step"] = load
    parts.update(sections or {})
    parts["Arguments"] = {name: value for name, value in arguments.items() if value is not None}
    page = PAGE.format(
        title=html.escape(title),
        plots=_draw_plots(records),
        caption=CAPTION if _select(records, "final") else "",
        sections="".join(_write_section(heading, content) for heading, content in parts.items()),
    )
    partial = path.with_name(f".{path.name}.partial")
    # An argument, such as a path, may have a lone surrogate, which UTF-8 cannot hold.
    partial.write_text(page, encoding="utf-8", errors="backslashreplace")
    partial.rename(path)


def plot_loss(
    records: Records,
    path: Path,
    *,
    tokens_per_step: int,
    entropy: float,
    entropy_label: str,
    title: str,
) -> None:
    """Plots the losses in the records of `metrics.jsonl` over the tokens trained on, to a PNG.

    Args:
        records: A dict for each line of `metrics.jsonl`.
        path: The picture.
        tokens_per_step: Tokens of a global batch.
        entropy: A loss to compare with, drawn as a line; in nats per target token, as the losses.
        entropy_label: What the legend calls it.
        title: The heading of the picture.
    """
    from matplotlib.figure import Figure  # imported here because only one rank plots

    train = _select(records, "train")
    total = max([record["step"] for record in records if "step" in record] or [1])
    unit, size = choose_unit(total * tokens_per_step)
    per_step = tokens_per_step / size
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    at = [record["step"] * per_step for record in train]
    losses = np.array([record["train/loss"] for record in train])
    means = np.array([record.get("train/mean_loss", record["train/loss"]) for record in train])
    axes.plot(at, losses, color=PALE_BLUE, linewidth=0.8, label="training, each logged step")
    axes.plot(at, smoothed(means), color=BLUE, linewidth=1.8, label="training, running mean")
    _plot_evaluations(axes, records, per_step)
    axes.axhline(entropy, color=RED, linestyle="--", label=entropy_label)
    axes.set(xlabel=f"tokens trained on ({unit})", ylabel="loss (nats per target token)")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)


def choose_unit(tokens: float) -> tuple[str, float]:
    """Returns the unit in which a number of tokens is at least 1, and its size."""
    for unit, size in (("billions", 1e9), ("millions", 1e6)):
        if tokens >= size:
            return unit, size
    return "thousands", 1e3


def smoothed(values: np.ndarray, share: float = 0.02) -> np.ndarray:
    """Returns running means over a window of `share` of the points.

    Near the beginning it is the last quarter of the points so far, because a mean over all of them
    would lie far above a loss that falls.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    widths = np.maximum(np.minimum(ends // 4, int(share * len(values))), 1)
    starts = ends - widths
    return (sums[ends] - sums[starts]) / (ends - starts)


def _select(records: Records, kind: str) -> Records:
    """Returns the records of one kind: "train", "valid" (evaluations at intervals) or "final" (that
    of all held-out samples).
    """
    return [record for record in records if f"{kind}/loss" in record]


def _summarize(records: Records) -> dict[str, str]:
    """Returns the rows of the table of results."""
    train = _select(records, "train")
    valid = _select(records, "valid")
    final = _select(records, "final")
    rows: dict[str, str] = {}
    if train:
        window = max(1, round(len(train) * MEAN_SHARE))
        before = 0
        if window < len(train):
            before = int(train[-window - 1]["step"])
        first_steps = int(train[window - 1]["step"])
        last_steps = int(train[-1]["step"]) - before
        first_loss = _average_loss(train[:window], 0)
        last_loss = _average_loss(train[-window:], before)
        speed = np.median([record["train/tokens_per_second"] for record in train])
        seconds = np.median([record["train/seconds"] for record in train])
        utilization = np.median([record["train/mfu"] for record in train])
        memory = max(record["train/memory_gb"] for record in train)
        rows["steps"] = f"{train[-1]['step']:,.0f}"
        rows["training loss"] = (
            f"{last_loss:.4f}, the mean of the last {last_steps:,} steps "
            f"(of the first {first_steps:,}: {first_loss:.4f})"
        )
        rows["target tokens per second (median)"] = f"{speed:,.0f}"
        rows["seconds per step (median)"] = f"{seconds:.4f}"
        rows["share of the device's peak arithmetic (median)"] = f"{utilization:.1%}"
        rows["peak memory"] = f"{memory:.2f} GB"
    if valid:
        best = min(valid, key=lambda record: record["valid/loss"])
        rows["best held-out loss"] = f"{best['valid/loss']:.4f} at step {best['step']:,.0f}"
        rows["last held-out evaluation"] = _list_values(valid[-1], "valid/")
    if final:
        rows["final evaluation"] = _list_values(final[-1], "final/")
    return rows


def _list_expert_load(records: Records) -> dict[str, str]:
    """Returns the rows of the table of a mixture's layers; none of another model."""
    train = [record for record in records if "train/router/load" in record]
    if not train:
        return {}
    last = train[-1]
    rows: dict[str, str] = {}
    prefix = "train/router/load/"
    for name, load in last.items():
        if not name.startswith(prefix):
            continue
        layer = name.removeprefix(prefix)
        text = f"busiest expert {load:.2f} of the mean"
        entropy = last.get(f"train/router/entropy/{layer}")
        if entropy is not None:
            text += f", entropy {entropy:.3f} of an even load's"
        dropped = last.get(f"train/router/dropped/{layer}")
        if dropped is not None:
            text += f", {dropped:.1%} dropped"
        rows[f"layer {layer}"] = text
    return rows


def _average_loss(train: Records, before: int) -> float:
    """Returns the mean training loss of the steps after step `before` up to the last record.

    Each record has the mean of the steps since the one before it; records of older runs have the
    loss of their own step alone.
    """
    total = 0.0
    previous = before
    for record in train:
        loss = record.get("train/mean_loss", record["train/loss"])
        total += loss * (record["step"] - previous)
        previous = record["step"]
    return total / (previous - before)


def _list_values(record: dict[str, float], prefix: str) -> str:
    """Returns the values of an evaluation, and its step."""
    values = []
    for name, value in record.items():
        if name.startswith(prefix):
            values.append(f"{name.removeprefix(prefix)} {value:.4f}")
    return f"{', '.join(values)} at step {record['step']:,.0f}"


def _draw_plots(records: Records) -> str:
    """Returns plots of loss, learning rate and gradient norm over the steps, and of the load of a
    mixture's busiest expert, as inline SVG.
    """
    from matplotlib.figure import Figure  # imported here because only one rank plots

    train = _select(records, "train")
    shown = [("train/lr", "learning rate"), (GRADIENT_NORM, "gradient norm")]
    if any("train/router/load" in record for record in train):
        shown.append(("train/router/load", "expert load"))
    figure = Figure(figsize=(8, 3.7 + 0.9 * len(shown)))
    # Fixed margins, because measuring the texts to find them takes longer than all the rest.
    margins = {"left": 0.11, "right": 0.98, "bottom": 0.09, "top": 0.98, "hspace": 0.2}
    heights = (3, *(1 for _ in shown))
    loss, *others = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights, gridspec_kw=margins
    )

    if train:
        steps = np.array([record["step"] for record in train])
        losses = np.array([record["train/loss"] for record in train])
        means = np.array([record.get("train/mean_loss", record["train/loss"]) for record in train])
        loss.plot(steps, losses, color=PALE_BLUE, linewidth=0.8, label="training, each logged step")
        loss.plot(steps, smoothed(means), color=BLUE, linewidth=1.8, label="training, running mean")
    _plot_evaluations(loss, records, 1.0)
    if train or _select(records, "valid") or _select(records, "final"):
        loss.legend()
    loss.set_ylabel("loss (nats per target)")

    for axes, (name, label) in zip(others, shown, strict=True):
        logged = [record for record in train if name in record]
        steps = [record["step"] for record in logged] or [0]
        values = [record[name] for record in logged] or [0]
        axes.plot(steps, values, color=RED)
        axes.set_ylabel(label)
        if name == GRADIENT_NORM and 10 < max(values) < math.inf:
            # One early step has many times the norm of all others, so the axis is linear below 1
            # and logarithmic above.
            decades = [10**power for power in range(math.ceil(math.log10(max(values))))]
            axes.set_yscale("asinh", linear_width=1.0)
            axes.set_ylim(bottom=0)
            axes.set_yticks([0, *decades], [f"{tick:,}" for tick in (0, *decades)])
    others[-1].set_xlabel("step")
    others[-1].xaxis.set_major_formatter("{x:,.0f}")
    for axes in (loss, *others):
        axes.grid(alpha=0.3)

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    # What comes before is the declaration of an XML file, which has no place in a page.
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _plot_evaluations(axes: Any, records: Records, per_step: float) -> None:
    """Draws the evaluations at intervals as a line and the final one as a point, and writes the
    value of the last one.

    Args:
        per_step: How much of the horizontal axis a step takes.
    """
    valid = _select(records, "valid")
    final = _select(records, "final")
    if valid:
        at = [record["step"] * per_step for record in valid]
        losses = [record["valid/loss"] for record in valid]
        axes.plot(at, losses, "o-", color=DARK_BLUE, label="held-out, at intervals")
    if final:
        point = (final[-1]["step"] * per_step, final[-1]["final/loss"])
        axes.plot(*point, "D", color=RED, label="held-out, final evaluation of all samples")
    elif valid:
        point = (valid[-1]["step"] * per_step, valid[-1]["valid/loss"])
    else:
        return
    # The curve of training ends below the point, and the pale one behind it is covered.
    place = {"textcoords": "offset points", "xytext": (4, 9), "ha": "right", "va": "bottom"}
    cover = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    axes.annotate(f"{point[1]:.4f}", point, bbox=cover, **place)


def _write_section(heading: str, content: Section) -> str:
    """Returns a section of the page: a text as it is, or a table of names and values."""
    if isinstance(content, str):
        return f"<h2>{html.escape(heading)}</h2><pre>{html.escape(content)}</pre>"
    rows = ""
    for name, value in content.items():
        rows += f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>"
    return f"<h2>{html.escape(heading)}</h2><table>{rows}</table>"
