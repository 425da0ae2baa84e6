"""Computes losses with label smoothing, class weights and sample weights from a model's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.language_model import IGNORED
from ..mpu import (
    ParallelMesh,
    cut_sequence,
    reduce_from_context,
    share_gradient,
    vocab_parallel_cross_entropy,
)
from ..trainer.batches.label_shift import shifts_labels
from ..trainer.distillation import Distillation

SMOOTHED = ("texts", "tokens", "classes", "words")  # what has classes or tokens as labels
WEIGHTED = ("classes", "words", "several classes")


def parse_class_weights(given: str, counts: Sequence[int]) -> list[float]:
    """Returns the weights of the classes: the given numbers, or "balanced" ones, n / (C · count).

    Args:
        counts: Number of each class in the training data, of which n is the sum; C classes.
    """
    if given == "balanced":
        return [sum(counts) / (len(counts) * max(1, count)) for count in counts]
    try:
        weights = [float(number) for number in given.split(",")]
    except ValueError:
        weights = []
    if len(weights) != len(counts) or min(weights, default=-1) < 0:
        raise ValueError(
            f"class_weights must be 'balanced' or {len(counts)} numbers of at least 0 with commas, "
            f"one for each class, not {given!r}"
        )
    return weights


@dataclass(frozen=True)
class WeightedLoss:
    """Computes the sum of weighted, smoothed losses divided by the number of targets, as for equal
    weights.

    Attributes:
        kind: What the labels are: a key of METRICS.
        native: Whether the model is the zoo's.
        has_decoder: Whether it is an encoder-decoder.
        smoothing: The share of a target's probability that all classes get equally (Szegedy et al.,
            2016).
        class_weights: A factor for the loss of each class; None for 1.
        distillation: Adds the divergence from a teacher to the losses of tokens in training; None
            without a teacher.
    """

    model: Any
    kind: str
    native: bool
    has_decoder: bool
    mesh: ParallelMesh | None
    smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    distillation: Distillation | None = None

    def __call__(self, data: Mapping[str, Any], run: Any) -> dict[str, Any]:
        """Runs the model on a batch. Returns `loss` and `logits`.

        The batch may have `sample_weight` [B], and the number of targets as `num_items_in_batch`.
        """
        batch = dict(data)
        data = dict(data)
        labels = data.pop("labels")
        weights = data.pop("sample_weight", None)
        items = data.pop("num_items_in_batch", None)
        if self.kind == "texts" and self.has_decoder:
            data["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels)
        logits = run(**data).logits
        losses, count = self.losses(logits, labels)  # of this context rank's tokens
        # An evaluation has the loss of the targets alone, whose exponential is the perplexity.
        if self.distillation is not None and torch.is_grad_enabled():
            losses = self.distillation.mix(losses, self.distillation.measure(logits, batch))
        if weights is not None:
            losses = losses * weights.view(-1, *[1] * (losses.dim() - 1))
        if items is not None:
            count = items
        loss = losses.sum() / count
        if self.kind in ("texts", "tokens"):
            return {"loss": reduce_from_context(loss, self.mesh), "logits": logits}
        return {"loss": share_gradient(loss, self.mesh), "logits": logits}

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of each target, 0 where a label is ignored, and the number of targets."""
        if self.kind in ("texts", "tokens"):
            return self._token_losses(logits, labels)
        logits = logits.float()
        if self.kind == "numbers":
            losses = F.mse_loss(logits.view_as(labels), labels, reduction="none")
            return losses, torch.tensor(labels.numel(), device=losses.device)
        if self.kind == "several classes":
            losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            factors = 1.0 if self.class_weights is None else logits.new_tensor(self.class_weights)
            return losses * factors, torch.tensor(labels.numel(), device=losses.device)
        flat = F.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            reduction="none",
            label_smoothing=self.smoothing,
        )
        losses = flat.view(labels.shape)
        kept = labels != IGNORED
        if self.class_weights is not None:
            losses = losses * logits.new_tensor(self.class_weights)[labels.masked_fill(~kept, 0)]
        return losses, kept.sum()

    def _place_targets(self, labels: Tensor) -> Tensor:
        """Returns the target of each position of the logits."""
        if self.native:
            return self.model.targets(labels)
        if shifts_labels(self.model):
            return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return labels

    def _token_losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Does what `losses` does for labels that are tokens."""
        targets = self._place_targets(labels)
        losses = vocab_parallel_cross_entropy(
            logits,
            cut_sequence(targets, self.mesh),
            num_classes=self.model.config.vocab_size,
            label_smoothing=self.smoothing,
            reduction="none",
            mesh=self.mesh if self.native else None,
        )
        return losses, (targets != IGNORED).sum()
