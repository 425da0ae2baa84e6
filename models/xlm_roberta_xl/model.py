"""XLM-RoBERTa-XL (Goyal et al., 2021, "Larger-Scale Transformers for Multilingual Masked Language
Modeling", arXiv:2105.00572).

It is XLM-RoBERTa with these differences:

- pre-LayerNorm blocks: x + attention(norm(x)), then x + mlp(norm(x)); a norm after the blocks
- the embeddings are not normalized, and the output of the MLP has no dropout
"""

from __future__ import annotations

from torch import Tensor

from ..bert.pre_norm import PreNormBertBackbone, PreNormBertBlock, PreNormBertEncoder
from ..generation.mixin import GenerationMixin
from ..roberta.model import (
    RobertaForCausalLM,
    RobertaForMaskedLM,
    RobertaForMultipleChoice,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
)


class XLMRobertaXLBlock(PreNormBertBlock):
    """A block whose MLP's output is not dropped."""

    def add_mlp(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class XLMRobertaXLEncoder(PreNormBertEncoder):
    """The embeddings and blocks, and a norm after them."""

    block_class = XLMRobertaXLBlock


class XLMRobertaXLBackbone(PreNormBertBackbone):
    """The encoder; with `config.is_decoder` a decoder. With `mesh=None` the model is not split."""

    encoder_class = XLMRobertaXLEncoder


class XLMRobertaXLModel(XLMRobertaXLBackbone, RobertaModel):
    """XLM-RoBERTa-XL without a head."""


class XLMRobertaXLForMaskedLM(XLMRobertaXLBackbone, RobertaForMaskedLM):
    """XLM-RoBERTa-XL that predicts masked tokens."""


class XLMRobertaXLForCausalLM(XLMRobertaXLBackbone, RobertaForCausalLM, GenerationMixin):
    """XLM-RoBERTa-XL that predicts the next token."""


class XLMRobertaXLForSequenceClassification(XLMRobertaXLBackbone, RobertaForSequenceClassification):
    """XLM-RoBERTa-XL that classifies a text."""


class XLMRobertaXLForTokenClassification(XLMRobertaXLBackbone, RobertaForTokenClassification):
    """XLM-RoBERTa-XL that classifies each token."""


class XLMRobertaXLForMultipleChoice(XLMRobertaXLBackbone, RobertaForMultipleChoice):
    """XLM-RoBERTa-XL that chooses one of several texts."""


class XLMRobertaXLForQuestionAnswering(XLMRobertaXLBackbone, RobertaForQuestionAnswering):
    """XLM-RoBERTa-XL that finds the first and the last token of an answer."""
