"""XLM-RoBERTa (Conneau et al., 2019): RoBERTa with a multilingual vocabulary."""

from __future__ import annotations

from ..generation.mixin import GenerationMixin
from ..roberta.model import (
    RobertaForCausalLM,
    RobertaForMaskedLM,
    RobertaForMultipleChoice,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
)


class XLMRobertaModel(RobertaModel):
    """XLM-RoBERTa without a head."""


class XLMRobertaForMaskedLM(RobertaForMaskedLM):
    """XLM-RoBERTa that predicts masked tokens."""


class XLMRobertaForCausalLM(RobertaForCausalLM, GenerationMixin):
    """XLM-RoBERTa that predicts the next token."""


class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """XLM-RoBERTa that classifies a text."""


class XLMRobertaForTokenClassification(RobertaForTokenClassification):
    """XLM-RoBERTa that classifies each token."""


class XLMRobertaForMultipleChoice(RobertaForMultipleChoice):
    """XLM-RoBERTa that chooses one of several texts."""


class XLMRobertaForQuestionAnswering(RobertaForQuestionAnswering):
    """XLM-RoBERTa that finds the first and the last token of an answer."""
