"""CamemBERT (Martin et al., 2019): RoBERTa with a French vocabulary."""

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


class CamembertModel(RobertaModel):
    """CamemBERT without a head."""


class CamembertForMaskedLM(RobertaForMaskedLM):
    """CamemBERT that predicts masked tokens."""


class CamembertForCausalLM(RobertaForCausalLM, GenerationMixin):
    """CamemBERT that predicts the next token."""


class CamembertForSequenceClassification(RobertaForSequenceClassification):
    """CamemBERT that classifies a text."""


class CamembertForTokenClassification(RobertaForTokenClassification):
    """CamemBERT that classifies each token."""


class CamembertForMultipleChoice(RobertaForMultipleChoice):
    """CamemBERT that chooses one of several texts."""


class CamembertForQuestionAnswering(RobertaForQuestionAnswering):
    """CamemBERT that finds the first and the last token of an answer."""
