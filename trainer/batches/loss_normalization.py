"""What the loss of a step is divided by, so that it is the mean over the targets of the global batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...models.common.config import ModelConfig

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
        """The micro-batch's share of the step's loss. ValueError for a loss without a gradient."""
        if not loss.requires_grad:
            raise ValueError(
                "forward_step must return a scalar tensor as loss, not one without a gradient: do not detach it, nor "
                "compute it under torch.no_grad()"
            )
        if self.normalizers:
            return loss
        own = self._count(batch, "labels")
        if not own:  # the mean over nothing is not a number, and must reach no gradient
            return loss.nan_to_num() * 0.0
        return loss * (own / totals[0])

    def _count(self, batch: Mapping[str, Any], labels: str) -> int:
        values = batch.get(labels)
        if not isinstance(values, Tensor):
            return _rows(batch)
        if labels != "labels" or values.is_floating_point():
            return int((values != IGNORED).sum()) if labels != "labels" else _rows(batch)
        if hasattr(self._model, "count_targets"):
            return int(self._model.count_targets(values))
        return int(((values[:, 1:] if self._shifted else values) != IGNORED).sum())


def label_problem(batch: Mapping[str, Any], model: nn.Module, first_sample: int) -> str:
    """What is wrong with a micro-batch's labels or token ids, which lie in CPU memory; nothing if nothing is.

    ValueError for a micro-batch that is no dict.
    """
    _check_batch(batch)
    config: Any = getattr(model, "config", None)
    labels = batch.get("labels")
    limits = {"input_ids": getattr(config, "vocab_size", None)}
    if limits["input_ids"] is not None:
        limits["input_ids"] += getattr(model, "extra_input_ids", 0)
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        limits["labels"] = _label_limit(labels, model)
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


def _label_limit(labels: Tensor, model: nn.Module) -> int | None:
    """How many classes integer labels are of; None if unknown, for other models' configurations may not tell."""
    config: Any = getattr(model, "config", None)
    of_sequences, of_tokens = isinstance(config, ModelConfig), False
    for kind in type(model).__mro__:
        if kind.__module__.split(".")[0] in ("transformers", "peft"):
            of_sequences |= kind.__name__.endswith(("ForSequenceClassification", "ForImageClassification"))
            of_tokens |= kind.__name__.endswith("ForTokenClassification")
    if (labels.dim() == 1) if of_sequences else of_tokens:
        classes = getattr(config, "num_labels", None)
        return None if classes == 1 else classes  # one is a regression, whose labels may be any number
    return None if labels.dim() == 1 else getattr(config, "vocab_size", None)


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, Mapping):
        raise ValueError(f"collate_fn must give a dict of tensors, not a {type(batch).__name__}")


def _rows(batch: Mapping[str, Any]) -> int:
    return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 1)


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """ValueError for a batch that is no dict."""
    _check_batch(batch)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
