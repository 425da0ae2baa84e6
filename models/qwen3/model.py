"""Qwen3 (Yang et al., 2025): Llama with norms of each head's queries and keys."""

from __future__ import annotations

from ..generation.mixin import GenerationMixin
from ..llama.model import (
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)


class Qwen3ForCausalLM(LlamaForCausalLM, GenerationMixin):
    """Qwen3 that predicts the next token."""


class Qwen3Model(LlamaModel):
    """Qwen3 without a head."""


class Qwen3ForSequenceClassification(LlamaForSequenceClassification):
    """Qwen3 that classifies a text."""


class Qwen3ForTokenClassification(LlamaForTokenClassification):
    """Qwen3 that classifies each token."""


class Qwen3ForQuestionAnswering(LlamaForQuestionAnswering):
    """Qwen3 that finds the first and the last token of an answer."""
