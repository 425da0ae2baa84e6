"""Normalizes losses: the loss of a step is the mean over the target tokens of the global batch.

Labels of -100 are ignored. Labels and token ids are checked before the first forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...models.config import ModelConfig
from ...models.language_model import count_mask, note_target_count, note_token_count
from ...ops.device import host_can_read, pins_host_memory
from .label_shift import IGNORED, shifts_labels

# An argument of a model's forward pass -> the labels that it counts.
COUNTED_LABELS = {"num_items_in_batch": "labels", "num_sequences_in_batch": "next_sentence_label"}


class LossNormalizer:
    """Counts a model's targets, and converts the loss of a micro-batch to its share of the step's
    loss.

    A model of the zoo takes the counts of the global batch as arguments of its forward pass, and
    returns its share. Any other loss is a mean over the targets of the micro-batch, and is rescaled
    here. This includes transformers' models, which accept the same arguments but do not all use
    them.

    To find out how a model of another library treats labels, the constructor may run it once, on
    two tokens; see `label_shift`. All ranks create their normalizers together.

    Args:
        model: The model itself, without an engine's wrapper.
        mean_losses: The losses are means in any case, because `forward_step` is the user's own.
    """

    def __init__(self, model: nn.Module, *, mean_losses: bool) -> None:
        self._model: Any = model
        parameters = inspect.signature(model.forward).parameters
        self.arguments: tuple[str, ...] = ()
        if not mean_losses:
            self.arguments = tuple(name for name in COUNTED_LABELS if name in parameters)
        # The zoo's models count their targets themselves.
        self._shifts_labels = not hasattr(model, "count_targets") and shifts_labels(model)

    def count(self, batch: Mapping[str, Any]) -> list[float]:
        """Returns the numbers of targets in a micro-batch: one for each of `arguments`, or only one
        without them.
        """
        if self.arguments:
            return [float(self._count(batch, COUNTED_LABELS[name])) for name in self.arguments]
        return [float(self._count(batch, "labels"))]

    def model_arguments(self, totals: list[float]) -> dict[str, float]:
        """Returns the keywords that pass the counts of the global batch to the forward pass."""
        return {name: max(total, 1.0) for name, total in zip(self.arguments, totals, strict=False)}

    def normalize(self, loss: Tensor, counts: list[float], totals: list[float]) -> Tensor:
        """Returns the micro-batch's share of the step's loss. Raises ValueError if the loss has no
        gradient.

        `counts` are the target counts of the micro-batch, and `totals` those of the global batch.
        """
        if not loss.requires_grad:
            raise ValueError(
                "forward_step must return a scalar tensor as loss, not one without a gradient: do not detach it or "
                "compute it under torch.no_grad()"
            )
        if self.arguments:
            return loss
        if not counts[0]:  # the mean over no targets is NaN, which must not reach a gradient
            return loss.nan_to_num() * 0.0
        return loss * (counts[0] / totals[0])

    def _count(self, batch: Mapping[str, Any], labels: str) -> int:
        values = batch.get(labels)
        if not isinstance(values, Tensor):
            return _count_rows(batch)
        if labels != "labels":
            return int((values != IGNORED).sum())
        if hasattr(self._model, "count_targets"):
            return int(self._model.count_targets(values))
        if values.is_floating_point():
            return _count_rows(batch)
        if self._shifts_labels:
            values = values[:, 1:]
        return int((values != IGNORED).sum())


def find_loss(output: Any) -> Tensor:
    """Returns the loss in the output of a forward step.

    Raises ValueError if it is missing or not a scalar tensor.
    """
    loss = find_output_field(output, "loss")
    if loss is None:
        raise ValueError(
            "forward_step returned no loss: return a dict or ModelOutput with one, and put labels in the data"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            found = f"one of shape {tuple(loss.shape)}"
        raise ValueError(f"forward_step must return a scalar tensor as loss, not {found}")
    return loss


def find_output_field(output: Any, name: str) -> Any:
    """Returns a field of a dict or a ModelOutput, or None."""
    if isinstance(output, Mapping):
        return output.get(name)
    return getattr(output, name, None)


def describe_label_problem(batch: Mapping[str, Any], model: nn.Module, first_sample: int) -> str:
    """Returns a message about labels or token ids of a micro-batch that are out of range, or an
    empty string.

    The micro-batch is in CPU memory. Raises ValueError if it is not a dict.
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
        allowed = f"from 0 to {limit - 1}"
        if name == "labels":
            wrong &= values != IGNORED
            allowed += ", or -100 to be ignored"
        places = wrong.nonzero().tolist()
        if not places:
            continue
        row, *columns = places[0]
        at = f" at position {columns[0]}" if columns else ""
        value = int(values[tuple(places[0])])
        return (
            f"{name} of training sample {first_sample + row}{at} is {value}; it must be {allowed}"
        )
    return ""


def _label_limit(labels: Tensor, model: nn.Module) -> int | None:
    """Returns the number of classes of integer labels, or None if the model's configuration may not
    define it.
    """
    config: Any = getattr(model, "config", None)
    if isinstance(config, ModelConfig):
        return getattr(model, "label_classes", None)
    names = [
        kind.__name__
        for kind in type(model).__mro__
        if kind.__module__.split(".")[0] in ("transformers", "peft")
    ]
    sequence_heads = ("ForSequenceClassification", "ForImageClassification")
    classifies_sequences = any(name.endswith(sequence_heads) for name in names)
    classifies_tokens = any(name.endswith("ForTokenClassification") for name in names)
    has_classes = labels.dim() == 1 if classifies_sequences else classifies_tokens
    if has_classes:
        classes = getattr(config, "num_labels", None)
        if classes == 1:  # a regression, whose labels may be any number
            return None
        return classes
    if labels.dim() == 1:
        return None
    return getattr(config, "vocab_size", None)


def _count_rows(batch: Mapping[str, Any]) -> int:
    """Returns the number of rows of the first tensor, which may be in a dict of the batch."""
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim():
            return len(value)
        if isinstance(value, Mapping):
            return _count_rows(cast(Mapping[str, Any], value))
    return 1


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns the batch with its tensors on `device`, also those of dicts in it. Raises ValueError
    if it is not a dict.

    The host does not wait for a copy to a GPU, which needs pinned memory.
    """
    _check_batch(batch)
    inner = {name: value for name, value in batch.items() if isinstance(value, Mapping)}
    if inner:
        batch = {**batch, **{name: to_device(value, device) for name, value in inner.items()}}
    pins = pins_host_memory(device)
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    pinned = {
        name: value.pin_memory() for name, value in tensors.items() if pins and host_can_read(value)
    }
    moved = {
        name: value.to(device, non_blocking=pins) for name, value in {**tensors, **pinned}.items()
    }
    if (
        "labels" in moved
        and moved["labels"] is not batch["labels"]
        and host_can_read(tensors["labels"])
    ):
        note_target_count(moved["labels"], int((tensors["labels"] != IGNORED).sum()))
    mask = tensors.get("attention_mask")
    if mask is not None and moved["attention_mask"] is not mask and host_can_read(mask):
        note_token_count(moved["attention_mask"], count_mask(mask))
    return {**batch, **moved}


def _check_batch(batch: Any) -> None:
    """Raises ValueError if a batch is not a dict."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"collate_fn must return a dict of tensors, not a {type(batch).__name__}; return several "
            "parts as a dict of dicts, and take them apart in forward_step"
        )
