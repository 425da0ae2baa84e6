"""Qwen2-MoE (Qwen Team, 2024): Qwen2 with mixtures and a shared expert."""

from __future__ import annotations

from ..generation.mixin import GenerationMixin
from ..mixtral.model import (
    MixtralForCausalLM,
    MixtralForQuestionAnswering,
    MixtralForSequenceClassification,
    MixtralForTokenClassification,
    MixtralModel,
)


class Qwen2MoeForCausalLM(MixtralForCausalLM, GenerationMixin):
    """Qwen2-MoE that predicts the next token."""


class Qwen2MoeModel(MixtralModel):
    """Qwen2-MoE without a head."""


class Qwen2MoeForSequenceClassification(MixtralForSequenceClassification):
    """Qwen2-MoE that classifies a text."""


class Qwen2MoeForTokenClassification(MixtralForTokenClassification):
    """Qwen2-MoE that classifies each token."""


class Qwen2MoeForQuestionAnswering(MixtralForQuestionAnswering):
    """Qwen2-MoE that finds the first and the last token of an answer."""
