"""The picture of a run: training and held-out loss against tokens, and what they are to be compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def plot_loss(
    records: list[dict[str, float]], path: Path, *, tokens_per_step: int, unigram_entropy: float, title: str
) -> None:
    """Draws `metrics.jsonl`'s records into a PNG. Losses and entropy are in nats per token."""
    from matplotlib.figure import Figure  # here, for only one rank draws

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
    """Running means over the last `share` of the points, of fewer at the beginning."""
    width = max(1, int(share * len(values)))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
