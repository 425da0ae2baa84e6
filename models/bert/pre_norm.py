"""BERT's blocks with norms before attention and MLP, as Megatron-BERT and XLM-RoBERTa-XL have them.

- x + attention(norm(x)), then x + mlp(norm(x)); a norm after the blocks
- the embeddings are not normalized
"""

from __future__ import annotations

from torch import Tensor, nn

from ...mpu import LayerNorm, ParallelMesh
from ..blocks.cache import LayerKVCache
from ..blocks.residual import add_and_norm
from ..parallel_config import ParallelConfig, layer_arguments
from .config import BertConfig
from .model import BertBackbone, BertBlock, BertEncoder


class PreNormBertBlock(BertBlock):
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
        return self.add_mlp(x, self.mlp(y))

    def add_mlp(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the sum of the residual stream and of the MLP's output, both [B, S, H]."""
        return self.mlp_dropout(y, x)


class PreNormBertEncoder(BertEncoder):
    """The embeddings and blocks, and a norm after them."""

    block_class = PreNormBertBlock

    def __init__(
        self, config: BertConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.embedding_norm = nn.Identity()
        shared = layer_arguments(mesh, parallel_config)
        self.final_norm = LayerNorm(config.hidden_size, config.layer_norm_eps, **shared)


class PreNormBertBackbone(BertBackbone):
    """The encoder; with `config.is_decoder` a decoder. With `mesh=None` the model is not split."""

    encoder_class = PreNormBertEncoder
