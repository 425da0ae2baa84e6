"""RoBERTa (Liu et al., 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach").

RoBERTa is BERT with these differences:
- positions count the tokens that are not padding, starting after the padding token's id
- there is no next-sentence prediction, so pretraining does not pool the first token's state
- the sequence classifier also applies dropout to its input; its dense layer replaces the pooler, as
  `pooler`; the pooler of the other heads is `encoder_pooler`
- the masked-language-model head always uses the exact GELU, independent of `hidden_act`
"""

from __future__ import annotations

from ..bert.model import BertBackbone
from ..generation.mixin import GenerationMixin
from ..heads import (
    BareModel,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)
from ..language_model import MaskedHeadCausalLM, MaskedLM


class RobertaModel(BareModel, BertBackbone):
    """RoBERTa without a head."""

    positional_inputs = BertBackbone.decoder_inputs
    pooler_name = "encoder_pooler"


class RobertaForMaskedLM(MaskedLM, BertBackbone):
    """RoBERTa that predicts masked tokens."""

    positional_inputs = BertBackbone.decoder_inputs


class RobertaForCausalLM(MaskedHeadCausalLM, BertBackbone, GenerationMixin):
    """RoBERTa that predicts the next token."""

    positional_inputs = BertBackbone.decoder_inputs


class RobertaForSequenceClassification(SequenceClassification, BertBackbone):
    """RoBERTa that classifies a text."""

    dense_name = "pooler"
    drops_input = True


class RobertaForTokenClassification(TokenClassification, BertBackbone):
    """RoBERTa that classifies each token."""


class RobertaForMultipleChoice(MultipleChoice, BertBackbone):
    """RoBERTa that chooses one of several texts."""

    positional_inputs = ("input_ids", "token_type_ids", "attention_mask")
    dense_name = "encoder_pooler"
    dropout_rate = "hidden_dropout_prob"


class RobertaForQuestionAnswering(QuestionAnswering, BertBackbone):
    """RoBERTa that finds the first and the last token of an answer."""
