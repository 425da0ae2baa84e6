"""GLM-4-0414 (2025): Llama with norms of all outputs, in which half of each head rotates."""

from __future__ import annotations

from ..generation.mixin import GenerationMixin
from ..llama.model import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)


class Glm4ForCausalLM(LlamaForCausalLM, GenerationMixin):
    """GLM-4 that predicts the next token."""


class Glm4Model(LlamaModel):
    """GLM-4 without a head."""


class Glm4ForSequenceClassification(LlamaForSequenceClassification):
    """GLM-4 that classifies a text."""


class Glm4ForTokenClassification(LlamaForTokenClassification):
    """GLM-4 that classifies each token."""
