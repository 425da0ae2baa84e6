"""DistilBERT (Sanh et al., 2019): BERT without segments and pooler, with half as many blocks."""

from __future__ import annotations

from ..bert.model import BertBackbone
from ..heads import (
    BareModel,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)
from ..language_model import MaskedLM


class DistilBertModel(BareModel, BertBackbone):
    """DistilBERT without a head."""


class DistilBertForMaskedLM(MaskedLM, BertBackbone):
    """DistilBERT that predicts masked tokens."""


class DistilBertForSequenceClassification(SequenceClassification, BertBackbone):
    """DistilBERT that classifies a text."""

    dense_name = "pre_classifier"
    activation = "relu"
    dropout_rate = "seq_classif_dropout"


class DistilBertForTokenClassification(TokenClassification, BertBackbone):
    """DistilBERT that classifies each token."""


class DistilBertForQuestionAnswering(QuestionAnswering, BertBackbone):
    """DistilBERT that finds the first and the last token of an answer."""

    dropout_rate = "qa_dropout"


class DistilBertForMultipleChoice(MultipleChoice, BertBackbone):
    """DistilBERT that chooses one of several texts."""

    dense_name = "pre_classifier"
    activation = "relu"
    dropout_rate = "seq_classif_dropout"
