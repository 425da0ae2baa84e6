"""Computes the loss of sequence classification, with one label, several labels or numbers for each sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.language_model import IGNORED
from .config import BertConfig, ProblemType
from .outputs import SequenceClassifierOutput


def class_loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Returns the fp32 cross-entropy of replicated logits [B, C] with classes int64 [B]; -100 is ignored.

    The result is the mean, or the sum divided by `num_items_in_batch`.
    """
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(widen(logits), labels.view(-1), ignore_index=IGNORED, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def widen(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class SequenceClassifier(nn.Module):
    """Base of the models that classify whole sequences. The logits are replicated."""

    config: BertConfig
    encoder: Any  # a BertEncoder, whose module imports this one

    def classify(self, first: Tensor) -> Tensor:
        """Returns the logits [B, num_labels] of the first token's hidden state [B, H]."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
    ) -> SequenceClassifierOutput:
        """Returns the logits and, with labels, the loss. See `loss` and `BertForMaskedLM` for the inputs."""
        hidden_states, _ = self.encoder(input_ids, attention_mask, token_type_ids, position_ids)
        logits = self.classify(self.encoder.first_token(hidden_states[-1]))  # [B, num_labels]
        loss = None if labels is None else self.loss(logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(loss, logits, tuple(hidden_states) if output_hidden_states else None)

    def problem_type(self, labels: Tensor) -> ProblemType:
        """Returns the configured problem type, or infers it like transformers: integer labels are classes."""
        if self.config.problem_type is not None:
            return self.config.problem_type
        if self.config.num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Returns the mean loss, or the sum divided by `num_items_in_batch`; see `count_targets`.

        The loss is the cross-entropy, the squared error, or the binary cross-entropy of each label.

        Args:
            logits: [B, num_labels].
            labels: Classes int64 [B] (-100 is ignored), or floats [B, num_labels] (or [B] for one output).
        """
        problem = self.problem_type(labels)
        if problem == "single_label_classification":
            return class_loss(logits, labels, num_items_in_batch)
        if labels.numel() != logits.numel():
            raise ValueError(
                f"{problem} needs labels of shape {tuple(logits.shape)}, one for each output, not {tuple(labels.shape)}"
            )
        function = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
        wide = widen(logits)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = function(wide, labels.view_as(wide).to(wide.dtype), reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def count_targets(self, labels: Tensor) -> Tensor:
        """Returns the number of terms in the loss of `labels`."""
        if self.problem_type(labels) == "single_label_classification":
            return (labels != IGNORED).sum()
        return torch.tensor(labels.numel(), device=labels.device)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits [B, num_labels] unchanged, because they are replicated."""
        return logits
