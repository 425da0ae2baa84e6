"""The language model of Gemma 3 (Gemma Team, 2025, "Gemma 3 Technical Report", arXiv:2503.19786), a
Gemma 2 (see `models/gemma/model.py`).

- five of six layers attend within a sliding window, and rotate by frequencies of their own
- norms of each head's queries and keys, instead of capped scores
"""

from __future__ import annotations

from ..gemma2.model import Gemma2ForCausalLM, Gemma2ForSequenceClassification, Gemma2Model
from ..generation.mixin import GenerationMixin


class Gemma3ForCausalLM(Gemma2ForCausalLM, GenerationMixin):
    """Gemma 3 that predicts the next token."""


class Gemma3TextModel(Gemma2Model):
    """Gemma 3's language model without a head."""


class Gemma3TextForSequenceClassification(Gemma2ForSequenceClassification):
    """Gemma 3 that classifies a text."""
