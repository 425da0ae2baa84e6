"""ELECTRA (Clark et al., 2020, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than
Generators").

ELECTRA is BERT with these differences:
- the embeddings may be narrower than the hidden states, and are then projected
- the discriminator finds the tokens that a generator, a masked language model, has replaced
- there is no pooler; a sequence classifier has a dense layer with GELU between two dropouts
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..bert.model import BertBackbone
from ..blocks.activation_functions import find_activation
from ..generation.mixin import GenerationMixin
from ..heads import (
    BareModel,
    Classifier,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
    widen,
)
from ..language_model import IGNORED, MaskedHeadCausalLM, MaskedLM
from ..outputs import ModelOutput
from .config import ElectraConfig


class Discriminator(nn.Module):
    """Scores replicated states [B, S, H]: [B, S]."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.activation = find_activation(config.hidden_act)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.activation(self.dense(x)))[..., 0]


class ReplacedTokenDetection(Classifier):
    """Tells the tokens that were replaced (1) from the original ones (0): labels int64 [B, S],
    logits [B, S].
    """

    def add_head(self) -> None:
        self.discriminator = Discriminator(self.config)

    @property
    def label_classes(self) -> int:
        return 2

    def compute_outputs(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> ModelOutput:
        """Returns the logits and, with labels, the loss, which padding has none of."""
        if labels is not None and attention_mask is not None:
            labels = labels.masked_fill(attention_mask == 0, IGNORED)
        options |= {"labels": labels, "num_items_in_batch": num_items_in_batch}
        return super().compute_outputs(input_ids, attention_mask=attention_mask, **options)

    def make_logits(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.discriminator(self.gather_hidden_states(x))

    def loss(
        self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Returns the mean binary cross-entropy, or the sum divided by `num_items_in_batch`."""
        counted = labels != IGNORED
        wide = widen(logits)
        losses = F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="none")
        number = counted.sum() if num_items_in_batch is None else num_items_in_batch
        return (losses * counted).sum() / number


class ElectraModel(BareModel, BertBackbone):
    """ELECTRA without a head."""

    positional_inputs = BertBackbone.decoder_inputs


class ElectraForMaskedLM(MaskedLM, BertBackbone):
    """ELECTRA that predicts masked tokens."""


class ElectraForCausalLM(MaskedHeadCausalLM, BertBackbone, GenerationMixin):
    """ELECTRA that predicts the next token."""

    positional_inputs = BertBackbone.decoder_inputs


class ElectraForPreTraining(ReplacedTokenDetection, BertBackbone):
    """ELECTRA's discriminator, which tells replaced tokens from original ones."""


class ElectraForSequenceClassification(SequenceClassification, BertBackbone):
    """ELECTRA that classifies a text."""

    dense_name = "pooler"
    drops_input = True
    activation = "gelu"


class ElectraForTokenClassification(TokenClassification, BertBackbone):
    """ELECTRA that classifies each token."""


class ElectraForQuestionAnswering(QuestionAnswering, BertBackbone):
    """ELECTRA that finds the first and the last token of an answer."""


class ElectraForMultipleChoice(MultipleChoice, BertBackbone):
    """ELECTRA that chooses one of several texts."""

    dense_name = "summary"
    activation = "gelu"
    dropout_rate = "summary_last_dropout"
