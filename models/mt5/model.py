"""mT5 (Xue et al., 2021): T5 v1.1 with an output head of its own and a multilingual vocabulary."""

from __future__ import annotations

from ..generation.mixin import GenerationMixin
from ..t5.model import (
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForQuestionAnswering,
    T5ForSequenceClassification,
    T5ForTokenClassification,
    T5Model,
)


class MT5ForConditionalGeneration(T5ForConditionalGeneration, GenerationMixin):
    """mT5 that answers a text with another one."""


class MT5Model(T5Model):
    """mT5 without a head."""


class MT5ForSequenceClassification(T5ForSequenceClassification):
    """mT5 that classifies a text."""


class MT5ForQuestionAnswering(T5ForQuestionAnswering):
    """mT5 that finds the first and the last token of an answer."""


class MT5EncoderModel(T5EncoderModel):
    """The encoder of mT5 without a head."""


class MT5ForTokenClassification(T5ForTokenClassification):
    """The encoder of mT5, classifying each token."""
