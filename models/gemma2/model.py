"""Gemma 2 (Gemma Team, 2024, "Gemma 2: Improving Open Language Models at a Practical Size",
arXiv:2408.00118), a Gemma (see `models/gemma/model.py`).

- norms of the outputs of attention and MLP too
- each second layer attends within a sliding window
- scores and logits are capped by a tanh
"""

from __future__ import annotations

from typing import cast

from ..gemma.model import (
    GemmaForCausalLM,
    GemmaForSequenceClassification,
    GemmaForTokenClassification,
    GemmaModel,
)
from ..generation.mixin import GenerationMixin
from ..language_model import vocabulary_head
from .config import Gemma2Config


class Gemma2ForCausalLM(GemmaForCausalLM, GenerationMixin):
    """Gemma 2 that predicts the next token."""

    def add_head(self) -> None:
        config = cast(Gemma2Config, self.config)
        self.head = vocabulary_head(self, softcap=config.final_logit_softcapping)


class Gemma2Model(GemmaModel):
    """Gemma 2 without a head."""


class Gemma2ForSequenceClassification(GemmaForSequenceClassification):
    """Gemma 2 that classifies a text."""


class Gemma2ForTokenClassification(GemmaForTokenClassification):
    """Gemma 2 that classifies each token."""
