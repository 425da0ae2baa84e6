"""Megatron-BERT (Shoeybi et al., 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models
Using Model Parallelism", arXiv:1909.08053, section 5.2).

It is BERT with these differences:

- pre-LayerNorm blocks: x + attention(norm(x)), then x + mlp(norm(x)); a norm after the blocks
- the embeddings are not normalized
- classifiers drop their input at the rate of the residual stream
"""

from __future__ import annotations

from ..bert.model import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
)
from ..bert.pre_norm import PreNormBertBackbone
from ..generation.mixin import GenerationMixin


class MegatronBertModel(PreNormBertBackbone, BertModel):
    """Megatron-BERT without a head."""


class MegatronBertForMaskedLM(PreNormBertBackbone, BertForMaskedLM):
    """Megatron-BERT that predicts masked tokens."""


class MegatronBertForCausalLM(PreNormBertBackbone, BertLMHeadModel, GenerationMixin):
    """Megatron-BERT that predicts the next token."""


class MegatronBertForPreTraining(PreNormBertBackbone, BertForPreTraining):
    """Megatron-BERT that predicts masked tokens, and whether the second sentence follows the first."""


class MegatronBertForNextSentencePrediction(PreNormBertBackbone, BertForNextSentencePrediction):
    """Megatron-BERT that predicts whether the second sentence follows the first."""


class MegatronBertForSequenceClassification(PreNormBertBackbone, BertForSequenceClassification):
    """Megatron-BERT that classifies a text."""


class MegatronBertForTokenClassification(PreNormBertBackbone, BertForTokenClassification):
    """Megatron-BERT that classifies each token."""


class MegatronBertForMultipleChoice(PreNormBertBackbone, BertForMultipleChoice):
    """Megatron-BERT that chooses one of several texts."""


class MegatronBertForQuestionAnswering(PreNormBertBackbone, BertForQuestionAnswering):
    """Megatron-BERT that finds the first and the last token of an answer."""
