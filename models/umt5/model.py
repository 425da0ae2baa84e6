"""UMT5 (Chung et al., 2023, arXiv:2304.09151): mT5 with a relative bias of its own in every layer."""

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


class UMT5ForConditionalGeneration(T5ForConditionalGeneration, GenerationMixin):
    """UMT5 that answers a text with another one."""


class UMT5Model(T5Model):
    """UMT5 without a head."""


class UMT5ForSequenceClassification(T5ForSequenceClassification):
    """UMT5 that classifies a text."""


class UMT5ForQuestionAnswering(T5ForQuestionAnswering):
    """UMT5 that finds the first and the last token of an answer."""


class UMT5EncoderModel(T5EncoderModel):
    """The encoder of UMT5 without a head."""


class UMT5ForTokenClassification(T5ForTokenClassification):
    """The encoder of UMT5, classifying each token."""
