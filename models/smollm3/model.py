"""SmolLM3 (Hugging Face, 2025): Llama in which each fourth layer does not rotate queries and keys
(Yang et al., 2025, arXiv:2501.18795).
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


class SmolLM3ForCausalLM(LlamaForCausalLM, GenerationMixin):
    """SmolLM3 that predicts the next token."""


class SmolLM3Model(LlamaModel):
    """SmolLM3 without a head."""


class SmolLM3ForSequenceClassification(LlamaForSequenceClassification):
    """SmolLM3 that classifies a text."""


class SmolLM3ForTokenClassification(LlamaForTokenClassification):
    """SmolLM3 that classifies each token."""


class SmolLM3ForQuestionAnswering(LlamaForQuestionAnswering):
    """SmolLM3 that finds the first and the last token of an answer."""
