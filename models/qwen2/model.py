"""Qwen2 and Qwen2.5 (Yang et al., 2024).

They are Llamas with biases of queries, keys and values, and with windows in some layers.
"""

from __future__ import annotations

from ..generation.mixin import GenerationMixin
from ..llama.model import (
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)


class Qwen2ForCausalLM(LlamaForCausalLM, GenerationMixin):
    """Qwen2 that predicts the next token."""


class Qwen2Model(LlamaModel):
    """Qwen2 without a head."""


class Qwen2ForSequenceClassification(LlamaForSequenceClassification):
    """Qwen2 that classifies a text."""


class Qwen2ForTokenClassification(LlamaForTokenClassification):
    """Qwen2 that classifies each token."""


class Qwen2ForQuestionAnswering(LlamaForQuestionAnswering):
    """Qwen2 that finds the first and the last token of an answer."""
