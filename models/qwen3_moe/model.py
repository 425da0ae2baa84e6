"""Qwen3-MoE (Yang et al., 2025): Qwen3 with mixtures of experts."""

from __future__ import annotations

from ..generation.mixin import GenerationMixin
from ..mixtral.model import (
    MixtralForCausalLM,
    MixtralForQuestionAnswering,
    MixtralForSequenceClassification,
    MixtralForTokenClassification,
    MixtralModel,
)


class Qwen3MoeForCausalLM(MixtralForCausalLM, GenerationMixin):
    """Qwen3-MoE that predicts the next token."""


class Qwen3MoeModel(MixtralModel):
    """Qwen3-MoE without a head."""


class Qwen3MoeForSequenceClassification(MixtralForSequenceClassification):
    """Qwen3-MoE that classifies a text."""


class Qwen3MoeForTokenClassification(MixtralForTokenClassification):
    """Qwen3-MoE that classifies each token."""


class Qwen3MoeForQuestionAnswering(MixtralForQuestionAnswering):
    """Qwen3-MoE that finds the first and the last token of an answer."""
