"""OLMo 3 (OLMo Team, 2025, "Olmo 3", arXiv:2512.13961), an OLMo 2 (see `models/olmo2/model.py`).

- three of four layers attend within a sliding window
- the layers that attend to the whole sequence may scale their rotary frequencies, the others do not
"""

from __future__ import annotations

from ..generation.mixin import GenerationMixin
from ..olmo2.model import Olmo2ForCausalLM, Olmo2ForSequenceClassification, Olmo2Model


class Olmo3ForCausalLM(Olmo2ForCausalLM, GenerationMixin):
    """OLMo 3 that predicts the next token."""


class Olmo3Model(Olmo2Model):
    """OLMo 3 without a head."""


class Olmo3ForSequenceClassification(Olmo2ForSequenceClassification):
    """OLMo 3 that classifies a text."""
