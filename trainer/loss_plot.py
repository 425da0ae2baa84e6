"""The picture of a run: training and held-out loss against tokens, and what they are to be compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def plot_loss(
    records: list[dict[str, float]], path: Path, *, tokens_per_step: int, unigram_entropy: float, title: str
) -> None:
    """Draws `metrics.jsonl`'s records into a PNG. Losses and entropy are in nats per token."""
    train = np.array([(r["step"], r["train/loss"]) for r in records if "train/loss" in r])
    valid = np.array([(r["step"], r["valid/loss"]) for r in records if "valid/loss" in r])
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(train[:, 0] * tokens_per_step / 1e6, train[:, 1], color="#9db8d9", linewidth=1, label="training")
    if len(valid):
        axes.plot(valid[:, 0] * tokens_per_step / 1e6, valid[:, 1], "o-", color="#1f4e8c", label="held-out text")
        axes.annotate(
            f"{valid[-1, 1]:.2f}",
            (valid[-1, 0] * tokens_per_step / 1e6, valid[-1, 1]),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
        )
    axes.axhline(unigram_entropy, color="#b5532a", linestyle="--", label="unigram entropy of the held-out text")
    axes.set(xlabel="tokens trained on (millions)", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
