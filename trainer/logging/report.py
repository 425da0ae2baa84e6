"""Writes the report of a finished run: `report.html`, one page that needs no other file, and a plot of the loss."""

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
td + td {{ font-variant-numeric: tabular-nums }} svg {{ width: 100%; height: auto }}
</style></head><body><h1>{title}</h1>{plots}<h2>Results</h2>{results}<h2>Arguments</h2>{arguments}</body></html>
"""


def write_report(path: Path, records: list[dict[str, float]], arguments: Mapping[str, Any], *, title: str) -> None:
    """Writes the page from the records of `metrics.jsonl` and the run's arguments."""
    train = [record for record in records if "train/loss" in record]
    valid = [record for record in records if "valid/loss" in record]
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
        last = {name.removeprefix("valid/"): value for name, value in valid[-1].items() if name != "step"}
        results["last validation"] = ", ".join(f"{name} {value:.4f}" for name, value in last.items())
    shown = {name: str(value) for name, value in arguments.items() if value is not None}
    page = PAGE.format(
        title=html.escape(title), plots=_plots(train, valid), results=_table(results), arguments=_table(shown)
    )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(page)
    partial.rename(path)


def _plots(train: list[dict[str, float]], valid: list[dict[str, float]]) -> str:
    """Returns plots of loss, learning rate and gradient norm over the steps, as inline SVG."""
    from matplotlib.figure import Figure  # imported here because only one rank plots

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    loss, *others = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    steps = np.array([record["step"] for record in train])
    values = np.array([record["train/loss"] for record in train])
    if len(train):
        loss.plot(steps, values, color="#c9d7ea", linewidth=0.8)
        loss.plot(steps, smoothed(values), color="#5f8fc9", linewidth=1.8, label="training")
    if valid:
        at = [record["step"] for record in valid]
        loss.plot(at, [record["valid/loss"] for record in valid], "o-", color="#14365f", label="validation")
    if train or valid:
        loss.legend()
    loss.set_ylabel("loss")
    for axes, name, label in zip(others, ("train/lr", "train/grad_norm"), ("learning rate", "grad norm"), strict=True):
        axes.plot(*zip(*[(r["step"], r[name]) for r in train if name in r] or [(0, 0)], strict=True), color="#b5532a")
        axes.set_ylabel(label)
    others[-1].set_xlabel("step")
    for axes in (loss, *others):
        axes.grid(alpha=0.3)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _table(rows: Mapping[str, str]) -> str:
    cells = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in rows.items())
    return f"<table>{cells}</table>"


def plot_loss(
    records: list[dict[str, float]], path: Path, *, tokens_per_step: int, unigram_entropy: float, title: str
) -> None:
    """Plots the records of `metrics.jsonl` to a PNG. Losses and entropy are in nats per token."""
    from matplotlib.figure import Figure  # imported here because only one rank plots

    train = np.array([(r["step"], r["train/loss"]) for r in records if "train/loss" in r])
    valid = np.array([(r["step"], r["valid/loss"]) for r in records if "valid/loss" in r])
    tokens = tokens_per_step / 1e6
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(train[:, 0] * tokens, train[:, 1], color="#c9d7ea", linewidth=0.8)
    axes.plot(train[:, 0] * tokens, smoothed(train[:, 1]), color="#5f8fc9", linewidth=1.8, label="training")
    if len(valid):
        axes.plot(valid[:, 0] * tokens, valid[:, 1], "o-", color="#14365f", label="held-out text")
        last = (valid[-1, 0] * tokens, valid[-1, 1])
        axes.annotate(f"{last[1]:.2f}", last, textcoords="offset points", xytext=(0, 10), ha="center")
    axes.axhline(unigram_entropy, color="#b5532a", linestyle="--", label="unigram entropy of the held-out text")
    axes.set(xlabel="tokens trained on (millions)", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def smoothed(values: np.ndarray, share: float = 0.02) -> np.ndarray:
    """Returns running means over a window of `share` of the points. The window is shorter at the beginning."""
    width = max(1, int(share * len(values)))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
