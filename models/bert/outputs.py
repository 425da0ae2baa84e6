"""What the encoders' forwards return: Hugging Face's field names.

hidden_states, where asked for: the embedding output and each block's output, [B, S, H] each.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..common.language_model import ModelOutput


@dataclass
class MaskedLMOutput(ModelOutput):
    """loss: scalar fp32, mean over the labels that are not -100; None without labels.

    logits: [B, S, Vp], this rank's columns of the padded vocabulary ([B, S, V] in one process);
        `model.gather_logits` gives [B, S, V]. With labels they are calculated when first read.
    """

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class PreTrainingOutput(ModelOutput):
    """loss: masked-language-model loss + next-sentence loss; None unless both kinds of labels are given.

    prediction_logits: [B, S, Vp], vocabulary-parallel; with both kinds of labels calculated when first read.
    seq_relationship_logits: [B, 2], replicated; class 0 says that the second sentence follows the first.
    """

    loss: Tensor | None
    prediction_logits: Tensor
    seq_relationship_logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class SequenceClassifierOutput(ModelOutput):
    """loss: scalar, None without labels. logits: [B, num_labels], replicated."""

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
