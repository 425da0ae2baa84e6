"""ModernBERT's heads: the classifiers begin with a dense layer, GELU and a norm, as the language
model does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...mpu import LayerNorm
from ..blocks.activation_functions import find_activation
from ..heads import (
    BareModel,
    Classifier,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)
from ..language_model import MaskedLM
from .config import ModernBertConfig
from .model import ModernBertBackbone


class Transform(nn.Module):
    """Computes norm(activation(dense(x))) of replicated states [..., H]."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.activation = find_activation(config.classifier_activation)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


class Transformed(Classifier):
    """A classifier of transformed states."""

    dropout_rate = "classifier_dropout"

    def add_head(self) -> None:
        self.head = Transform(self.config)
        super().add_head()
        self.pooling = "mean" if self.config.classifier_pooling == "mean" else "first"

    def score(self, x: Tensor) -> Tensor:
        return super().score(self.head(x))


class ModernBertModel(BareModel, ModernBertBackbone):
    """ModernBERT without a head."""


class ModernBertForMaskedLM(MaskedLM, ModernBertBackbone):
    """ModernBERT that predicts masked tokens."""


class ModernBertForSequenceClassification(Transformed, SequenceClassification, ModernBertBackbone):
    """ModernBERT that classifies a text."""


class ModernBertForTokenClassification(Transformed, TokenClassification, ModernBertBackbone):
    """ModernBERT that classifies each token."""


class ModernBertForQuestionAnswering(Transformed, QuestionAnswering, ModernBertBackbone):
    """ModernBERT that finds the first and the last token of an answer."""

    positional_inputs = ("input_ids", "attention_mask", "position_ids")


class ModernBertForMultipleChoice(Transformed, MultipleChoice, ModernBertBackbone):
    """ModernBERT that chooses one of several texts."""

    def pool(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None or self.pooling == "mean":
            return super().pool(x, input_ids, attention_mask)
        first = attention_mask.argmax(-1)  # that is not padding
        return self.gather_hidden_states(x)[torch.arange(len(first), device=first.device), first]
