"""Writes the report of a finished run: `report.html`, one page that needs no other file, and a plot
of the loss.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse; margin: 1em 0 }} td, th {{ padding: .15em 1em .15em 0; text-align: left }}
td + td {{ font-variant-numeric: tabular-nums }} svg {{ width: 100%; height: auto }} pre {{ white-space: pre-wrap }}
</style></head><body><h1>{title}</h1>{plots}{sections}</body></html>
"""

Section = str | Mapping[str, Any]  # a text, or the rows of a table: name -> value


def write_report(
    path: Path,
    records: list[dict[str, float]],
    arguments: Mapping[str, Any],
    *,
    title: str,
    sections: Mapping[str, Section] | None = None,
) -> None:
    """Writes the page from the records of `metrics.jsonl` and the run's arguments.

    Args:
        sections: Heading -> text or table, shown between the results and the arguments.
    """
    shown = {name: value for name, value in arguments.items() if value is not None}
    parts = {"Results": _results(records), **(sections or {}), "Arguments": shown}
    plots = _plots(*(_series(records, kind) for kind in KINDS))
    page = PAGE.format(
        title=html.escape(title),
        plots=plots,
        sections="".join(map(_section, parts, parts.values())),
    )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(
        page, encoding="utf-8", errors="backslashreplace"
    )  # an argument may have a lone surrogate
    partial.rename(path)


KINDS = ("train", "valid", "final")


def _series(records: list[dict[str, float]], kind: str) -> list[dict[str, float]]:
    """Returns the records of "train", "valid" (evaluations at intervals) or "final" (that of all
    held-out samples).
    """
    return [record for record in records if f"{kind}/loss" in record]


def _results(records: list[dict[str, float]]) -> dict[str, str]:
    train, valid, final = (_series(records, kind) for kind in KINDS)
    results: dict[str, str] = {}
    if train:
        seconds = np.array([record["train/seconds"] for record in train])
        results |= {
            "steps": f"{train[-1]['step']:,.0f}",
            "training loss": f"{train[-1]['train/loss']:.4f} (first {train[0]['train/loss']:.4f})",
            "tokens per second (median)": f"{np.median([r['train/tokens_per_second'] for r in train]):,.0f}",
            "seconds per step (median)": f"{np.median(seconds):.4f}",
            "share of the device's peak arithmetic (median)": f"{np.median([r['train/mfu'] for r in train]):.1%}",
            "peak memory": f"{max(r['train/memory_gb'] for r in train):.2f} GB",
        }
    if valid:
        best = min(valid, key=lambda record: record["valid/loss"])
        results["best validation loss"] = f"{best['valid/loss']:.4f} at step {best['step']:,.0f}"
        results["last validation"] = _values(valid[-1], "valid/")
    if final:
        results["final evaluation"] = _values(final[-1], "final/")
    return results


def _values(record: dict[str, float], prefix: str) -> str:
    values = {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix)
    }
    return (
        ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        + f" at step {record['step']:,.0f}"
    )


def _plots(
    train: list[dict[str, float]], valid: list[dict[str, float]], final: list[dict[str, float]]
) -> str:
    """Returns plots of loss, learning rate and gradient norm over the steps, as inline SVG."""
    from matplotlib.figure import Figure  # imported here because only one rank plots

    figure = Figure(figsize=(8, 5.5))
    margins = {
        "left": 0.11,
        "right": 0.98,
        "bottom": 0.09,
        "top": 0.98,
        "hspace": 0.2,
    }  # measuring texts takes longer
    loss, *others = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1), gridspec_kw=margins)
    steps = np.array([record["step"] for record in train])
    values = np.array([record["train/loss"] for record in train])
    if len(train):
        loss.plot(steps, values, color="#c9d7ea", linewidth=0.8)
        loss.plot(steps, smoothed(values), color="#5f8fc9", linewidth=1.8, label="training")
    _plot_evaluations(loss, valid, final, 1.0)
    if train or valid or final:
        loss.legend()
    loss.set_ylabel("loss")
    for axes, name, label in zip(
        others, ("train/lr", "train/grad_norm"), ("learning rate", "grad norm"), strict=True
    ):
        axes.plot(
            *zip(*[(r["step"], r[name]) for r in train if name in r] or [(0, 0)], strict=True),
            color="#b5532a",
        )
        axes.set_ylabel(label)
    others[-1].set_xlabel("step")
    for axes in (loss, *others):
        axes.grid(alpha=0.3)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _plot_evaluations(
    axes: Any, valid: list[dict[str, float]], final: list[dict[str, float]], per_step: float
) -> None:
    """Draws the evaluations at intervals as a line and the final one as a point, and writes its
    value.
    """
    if valid:
        at = [record["step"] * per_step for record in valid]
        axes.plot(
            at,
            [record["valid/loss"] for record in valid],
            "o-",
            color="#14365f",
            label="held-out, at intervals",
        )
    if final:
        point = (final[-1]["step"] * per_step, final[-1]["final/loss"])
        axes.plot(*point, "D", color="#b5532a", label="held-out, final evaluation")
    elif valid:
        point = (valid[-1]["step"] * per_step, valid[-1]["valid/loss"])
    else:
        return
    axes.annotate(f"{point[1]:.4f}", point, textcoords="offset points", xytext=(0, 10), ha="right")


def _section(heading: str, content: Section) -> str:
    if isinstance(content, str):
        body = f"<pre>{html.escape(content)}</pre>"
    else:
        rows = (
            (html.escape(str(name)), html.escape(str(value))) for name, value in content.items()
        )
        body = (
            "<table>"
            + "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
            + "</table>"
        )
    return f"<h2>{html.escape(heading)}</h2>{body}"


def plot_loss(
    records: list[dict[str, float]],
    path: Path,
    *,
    tokens_per_step: int,
    entropy: float,
    entropy_label: str,
    title: str,
) -> None:
    """Plots the records of `metrics.jsonl` to a PNG.

    Losses and `entropy` are in nats per target token.
    """
    from matplotlib.figure import Figure  # imported here because only one rank plots

    train, valid, final = (_series(records, kind) for kind in KINDS)
    millions = tokens_per_step / 1e6
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    at = [record["step"] * millions for record in train]
    losses = np.array([record["train/loss"] for record in train])
    axes.plot(at, losses, color="#c9d7ea", linewidth=0.8)
    axes.plot(at, smoothed(losses), color="#5f8fc9", linewidth=1.8, label="training")
    _plot_evaluations(axes, valid, final, millions)
    axes.axhline(entropy, color="#b5532a", linestyle="--", label=entropy_label)
    axes.set(xlabel="tokens trained on (millions)", ylabel="loss (nats per target token)")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def smoothed(values: np.ndarray, share: float = 0.02) -> np.ndarray:
    """Returns running means over a window of `share` of the points.

    The window is shorter at the beginning.
    """
    width = max(1, int(share * len(values)))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
