"""XLM-RoBERTa-XL (Goyal et al., 2021, "Larger-Scale Transformers for Multilingual Masked Language
Modeling", arXiv:2105.00572).

It is XLM-RoBERTa with these differences:

- pre-LayerNorm blocks: x + attention(norm(x)), then x + mlp(norm(x)); a norm after the blocks
- the embeddings are not normalized, and the output of the MLP has no dropout
"""

from __future__ import annotations

from torch import Tensor, nn

from ...mpu import LayerNorm, ParallelMesh
from ..bert.config import BertConfig
from ..bert.model import BertBackbone, BertBlock, BertEncoder
from ..blocks.cache import LayerKVCache
from ..blocks.residual import add_and_norm
from ..generation.mixin import GenerationMixin
from ..parallel_config import ParallelConfig, layer_arguments
from ..roberta.model import (
    RobertaForCausalLM,
    RobertaForMaskedLM,
    RobertaForMultipleChoice,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
)


class XLMRobertaXLBlock(BertBlock):
    """A block of BERT that normalizes the inputs of attention and MLP instead of their sums."""

    def compute(
        self,
        x: Tensor,
        mask: Tensor | None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        cache: LayerKVCache | None = None,
        source_cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Returns [B, S, H]. The arguments are those of `BertBlock.forward`."""
        y, x = self.attention_norm(x, return_residual=True)
        y = self.attention(y, mask, causal=self.is_decoder, cache=cache)
        dropout = self.attention_dropout
        if source is not None:
            y, x = add_and_norm(self.cross_attention_norm, dropout, y, x)
            y = self.cross_attention(y, source, source_mask, source_cache)
            dropout = self.cross_attention_dropout
        y, x = add_and_norm(self.mlp_norm, dropout, y, x)
        return x + self.mlp(y)


class XLMRobertaXLEncoder(BertEncoder):
    """The embeddings and blocks, and a norm after them."""

    block_class = XLMRobertaXLBlock

    def __init__(
        self, config: BertConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.embedding_norm = nn.Identity()
        shared = layer_arguments(mesh, parallel_config)
        self.final_norm = LayerNorm(config.hidden_size, config.layer_norm_eps, **shared)


class XLMRobertaXLBackbone(BertBackbone):
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
