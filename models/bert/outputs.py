"""Defines the outputs of the encoders' forward passes, with Hugging Face's field names.

If requested, `hidden_states` are the embedding output and each block's output, [B, S, H] each.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..common.language_model import ModelOutput


@dataclass
class MaskedLMOutput(ModelOutput):
    """The output of a masked language model. Its loss and logits are as in `CausalLMOutput`."""

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class PreTrainingOutput(ModelOutput):
    """The output of `BertForPreTraining`.

    Attributes:
        loss: Masked-language-model loss + next-sentence loss; None unless both kinds of labels are given.
        prediction_logits: [B, S, Vp], vocabulary-parallel; with both kinds of labels computed when first read.
        seq_relationship_logits: [B, 2], replicated; class 0 means that the second sentence follows the first.
    """

    loss: Tensor | None
    prediction_logits: Tensor
    seq_relationship_logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class SequenceClassifierOutput(ModelOutput):
    """The output of a sequence classifier: a scalar loss (None without labels), replicated logits [B, num_labels]."""

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
