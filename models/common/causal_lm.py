"""Causal language models: each position predicts the next token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .language_model import IGNORED, VOCABULARY_MULTIPLE, LanguageModel, PositionEmbedding

__all__ = ["IGNORED", "VOCABULARY_MULTIPLE", "CausalLM", "PositionEmbedding"]


class CausalLM(LanguageModel):
    """Base of the models that predict each token from those before it; their logits are vocabulary-parallel."""

    generates = "continuation"

    def targets(self, labels: Tensor) -> Tensor:
        # Shifting the labels, not the hidden states, keeps those contiguous and uncopied.
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
