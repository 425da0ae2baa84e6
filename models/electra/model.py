"""ELECTRA (Clark et al., 2020, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators").

ELECTRA is BERT with these differences:
- the embeddings may be narrower than the hidden states, and are then projected
- the discriminator finds the tokens that a generator, a masked language model, has replaced
- there is no pooler; a sequence classifier has a dense layer with GELU between two dropouts
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..common.heads import (
    BareModel,
    ClassifierOutput,
    Head,
    MaskedLM,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
    configured,
    widen,
)
from ..common.language_model import IGNORED
from ..common.transformer import find_activation
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


class ReplacedTokenDetection(Head):
    """Tells the tokens that were replaced (1) from the original ones (0)."""

    def add_head(self) -> None:
        self.discriminator = Discriminator(self.config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *inputs: Any,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        **options: Any,
    ) -> ClassifierOutput:
        """Returns the logits [B, S] and, with labels, the mean binary cross-entropy, or the sum / `num_items_in_batch`.

        Args:
            input_ids, attention_mask, inputs, options: See the family's `body`. Padding has no loss.
            labels: int64 [B, S], 0 or 1; -100 is ignored.
        """
        hidden = self.body(input_ids, attention_mask, *inputs, **options)
        logits = self.discriminator(self.gather_hidden_states(hidden.states[-1]))
        loss = None
        if labels is not None:
            counted = labels != IGNORED if attention_mask is None else (labels != IGNORED) & attention_mask.bool()
            wide = widen(logits)
            losses = F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="none")
            loss = (losses * counted).sum() / (counted.sum() if num_items_in_batch is None else num_items_in_batch)
        return ClassifierOutput(loss, logits, **self.shown_states(hidden, output_hidden_states))

    def count_targets(self, labels: Tensor) -> Tensor:
        """Returns the number of terms in the loss of `labels`, which must be -100 at padding."""
        return (labels != IGNORED).sum()

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits unchanged, because they are replicated."""
        return logits


HEADS = {
    "Model": BareModel,
    "ForMaskedLM": MaskedLM,
    "ForPreTraining": ReplacedTokenDetection,
    "ForSequenceClassification": configured(
        SequenceClassification, dense_name="pooler", drops_input=True, activation="gelu"
    ),
    "ForTokenClassification": TokenClassification,
    "ForQuestionAnswering": QuestionAnswering,
    "ForMultipleChoice": configured(
        MultipleChoice, dense_name="summary", activation="gelu", dropout_rate="summary_last_dropout"
    ),
}
