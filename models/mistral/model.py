"""Mistral (Jiang et al., 2023): Llama with attention within a sliding window."""

from __future__ import annotations

from ..generation.mixin import GenerationMixin
from ..llama.model import (
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)


class MistralForCausalLM(LlamaForCausalLM, GenerationMixin):
    """Mistral that predicts the next token."""


class MistralModel(LlamaModel):
    """Mistral without a head."""


class MistralForSequenceClassification(LlamaForSequenceClassification):
    """Mistral that classifies a text."""


class MistralForTokenClassification(LlamaForTokenClassification):
    """Mistral that classifies each token."""


class MistralForQuestionAnswering(LlamaForQuestionAnswering):
    """Mistral that finds the first and the last token of an answer."""
