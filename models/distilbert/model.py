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


class DistilBertBackbone(BertBackbone):
    """BERT's encoder with a `DistilBertConfig`."""

    positional_inputs = ("input_ids", "attention_mask", "inputs_embeds")


class DistilBertModel(BareModel, DistilBertBackbone):
    """DistilBERT without a head."""

    positional_inputs = (*DistilBertBackbone.positional_inputs, "position_ids")


class DistilBertForMaskedLM(MaskedLM, DistilBertBackbone):
    """DistilBERT that predicts masked tokens."""


class DistilBertForSequenceClassification(SequenceClassification, DistilBertBackbone):
    """DistilBERT that classifies a text."""

    dense_name = "pre_classifier"
    activation = "relu"
    dropout_rate = "seq_classif_dropout"


class DistilBertForTokenClassification(TokenClassification, DistilBertBackbone):
    """DistilBERT that classifies each token."""


class DistilBertForQuestionAnswering(QuestionAnswering, DistilBertBackbone):
    """DistilBERT that finds the first and the last token of an answer."""

    dropout_rate = "qa_dropout"


class DistilBertForMultipleChoice(MultipleChoice, DistilBertBackbone):
    """DistilBERT that chooses one of several texts."""

    dense_name = "pre_classifier"
    activation = "relu"
    dropout_rate = "seq_classif_dropout"
