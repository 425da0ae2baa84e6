"""Causal language models: each position predicts the next token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .language_model import IGNORED, VOCABULARY_MULTIPLE, LanguageModel, PositionEmbedding

__all__ = ["IGNORED", "VOCABULARY_MULTIPLE", "CausalLM", "PositionEmbedding"]


class CausalLM(LanguageModel):
    """Base of the models that predict each token from those before it; their logits are vocabulary-parallel."""

    def loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Cross-entropy of position t's logits [B, S, Vp] with the label at t + 1; labels int64 [B, S], -100 ignored.

        The mean over the labels, or their sum divided by `num_items_in_batch`, as in transformers.
        """
        # Shifting the labels, not the logits, keeps the logits contiguous and uncopied.
        return super().loss(logits, F.pad(labels[:, 1:], (0, 1), value=IGNORED), num_items_in_batch)

    def count_targets(self, labels: Tensor) -> Tensor:
        """How many predictions the loss of `labels` is made of."""
        return super().count_targets(labels[:, 1:])
