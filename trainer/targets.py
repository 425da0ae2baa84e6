"""What the loss of a step is divided by, so that it is the mean over the targets of the global batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100
# A model's argument -> the labels it counts.
NORMALIZERS = {"num_items_in_batch": "labels", "num_sequences_in_batch": "next_sentence_label"}


class Targets:
    """Counts a model's targets, and turns a micro-batch's loss into its share of the step's.

    A model of the zoo takes the numbers as arguments of its forward pass. Every other loss is a mean over the
    micro-batch's targets, of which the share follows: transformers' models take any keyword, but do not all use it.
    """

    def __init__(self, model: nn.Module, *, mean_losses: bool) -> None:
        """mean_losses: `forward_step` is the user's own, whose loss is a mean."""
        self._model: Any = model
        parameters = inspect.signature(model.forward).parameters
        self.normalizers = () if mean_losses else tuple(name for name in NORMALIZERS if name in parameters)
        self._shifted = getattr(model, "loss_type", None) == "ForCausalLM"

    def count(self, batch: Mapping[str, Any]) -> list[float]:
        """How many targets of each kind a micro-batch has: one number for each of `normalizers`, or one."""
        if self.normalizers:
            return [float(self._count(batch, NORMALIZERS[name])) for name in self.normalizers]
        return [float(self._count(batch, "labels"))]

    def arguments(self, totals: list[float]) -> dict[str, float]:
        """What the forward pass is told of the global batch."""
        return {name: max(total, 1.0) for name, total in zip(self.normalizers, totals, strict=False)}

    def share(self, loss: Tensor, batch: Mapping[str, Any], totals: list[float]) -> Tensor:
        """The micro-batch's share of the step's loss."""
        if self.normalizers:
            return loss
        own = self._count(batch, "labels")
        if not own:  # the mean over nothing is not a number, and must reach no gradient
            return loss.nan_to_num() * 0.0
        return loss * (own / totals[0])

    def _count(self, batch: Mapping[str, Any], labels: str) -> int:
        values = batch.get(labels)
        if values is None:
            return _rows(batch)
        if labels != "labels" or values.is_floating_point():
            return int((values != IGNORED).sum()) if labels != "labels" else _rows(batch)
        if hasattr(self._model, "count_targets"):
            return int(self._model.count_targets(values))
        return int(((values[:, 1:] if self._shifted else values) != IGNORED).sum())


def label_problem(batch: Mapping[str, Any], model: nn.Module, first_sample: int) -> str:
    """What is wrong with a micro-batch's labels or token ids, which lie in CPU memory; nothing if nothing is."""
    config: Any = getattr(model, "config", None)
    labels = batch.get("labels")
    limits = {"input_ids": getattr(config, "vocab_size", None)}
    if limits["input_ids"] is not None:
        limits["input_ids"] += getattr(model, "extra_input_ids", 0)
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        limits["labels"] = getattr(config, "num_labels" if labels.dim() == 1 else "vocab_size", None)
    for name, limit in limits.items():
        values = batch.get(name)
        if limit is None or not isinstance(values, Tensor) or not values.numel():
            continue
        if values.is_floating_point() or (values.max() < limit and values.min() >= 0):
            continue
        wrong = (values >= limit) | (values < 0)
        wrong = wrong & (values != IGNORED) if name == "labels" else wrong
        for place in wrong.nonzero().tolist()[:1]:
            at = f" at position {place[1]}" if len(place) > 1 else ""
            ignored = ", or -100 to be ignored" if name == "labels" else ""
            return (
                f"{name} of training sample {first_sample + place[0]}{at} is {int(values[tuple(place)])}; it must be "
                f"from 0 to {limit - 1}{ignored}"
            )
    return ""


def _rows(batch: Mapping[str, Any]) -> int:
    return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 1)


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
