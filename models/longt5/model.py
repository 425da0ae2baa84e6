"""LongT5 (Guo et al., 2021, "LongT5: Efficient Text-To-Text Transformer for Long Sequences",
arXiv:2112.07916), a T5 (see `models/t5/model.py`) for long sources.

- the encoder's tokens attend to their neighbors at most `local_radius` away, with the relative bias
  of T5
- with transient-global attention also to sums of blocks of tokens, which each layer adds up and
  normalizes anew; their relative bias has a table of its own
- the decoder is that of T5
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ...mpu import ParallelMesh, context_size
from ..blocks.attention import SelfAttention
from ..blocks.cache import Cache
from ..blocks.documents import Documents
from ..blocks.padding import Tokens
from ..blocks.relative_bias import RelativeBias
from ..generation.mixin import GenerationMixin
from ..parallel_config import ParallelConfig
from ..t5.model import (
    T5Backbone,
    T5Block,
    T5EncoderBackbone,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5Model,
    T5Stack,
)
from .attention import (
    LocalAttention,
    LocalPattern,
    TransientGlobalAttention,
    local_pattern,
    with_sums,
)
from .config import LongT5Config


class LongT5Block(T5Block):
    """One layer of the encoder, with local attention, or of the decoder."""

    def build_attention(self, config: Any, is_decoder: bool, **arguments: Any) -> SelfAttention:
        if is_decoder:
            return super().build_attention(config, is_decoder, **arguments)
        arguments.update(head_size=config.d_kv)
        if not config.sums_blocks:
            return LocalAttention(config.d_model, config.num_heads, **arguments)
        eps = config.layer_norm_epsilon
        return TransientGlobalAttention(config.d_model, config.num_heads, eps=eps, **arguments)


class LongT5Stack(T5Stack):
    """The encoder, whose blocks attend locally, or the decoder."""

    shared_by_blocks = ("relative_bias", "global_relative_bias")
    block_class: ClassVar[type[T5Block]] = LongT5Block

    def __init__(
        self,
        config: LongT5Config,
        is_decoder: bool,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__(config, is_decoder, mesh, parallel_config)
        if context_size(mesh) > 1:
            raise ValueError(
                "local attention does not split sequences: use context_parallel_size=1"
            )
        self.is_decoder = is_decoder
        self.block_length = config.block_length
        self.group = config.global_block_size
        self.global_relative_bias = None
        if config.sums_blocks and not is_decoder:
            self.global_relative_bias = RelativeBias(
                num_heads=config.num_heads, **self.bucketing, mesh=mesh
            )

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        mask: Any,
        source: Tensor | None = None,
        source_mask: Tensor | Tokens | Documents | None = None,
        cache: Cache | None = None,
        pieces: Tensor | None = None,
    ) -> list[Tensor]:
        if not self.is_decoder:
            mask = self.find_pattern(mask, ids)
        return super().forward(x, ids, mask, source, source_mask, cache, pieces)

    def find_pattern(self, mask: Any, ids: Tensor) -> LocalPattern:
        """Returns what the encoder's blocks share, from its mask of keys [B, 1, 1, S] or None.

        Raises:
            ValueError: The mask is another one.
        """
        if isinstance(mask, Documents):
            raise ValueError(
                "the encoder of a LongT5 does not take packed rows; give each sequence its own row"
            )
        if mask is not None and (mask.is_floating_point() or mask.shape[1:3] != (1, 1)):
            raise ValueError(
                "the attention_mask of a LongT5's encoder must be [B, S], 0 for padding, not one "
                f"that covers scores {tuple(mask.shape)}"
            )
        assert self.relative_bias is not None
        keys = None if mask is None else mask[:, 0, 0]
        size = ids.shape[:2]
        pattern = local_pattern(size, self.block_length, keys, self.relative_bias)
        if self.global_relative_bias is None:
            return pattern
        dtype = self.relative_bias.weight.dtype
        return with_sums(pattern, size, self.group, keys, self.global_relative_bias, dtype)

    def shared_arguments(
        self, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> tuple[Any]:
        if self.is_decoder:
            return super().shared_arguments(ids, cached, pieces)
        return (None,)  # The pattern has the bias.


class LongT5EncoderBackbone(T5EncoderBackbone):
    """The encoder without a head. With `mesh=None` the model is not split."""

    stack_class: ClassVar[type[T5Stack]] = LongT5Stack


class LongT5Backbone(LongT5EncoderBackbone, T5Backbone):
    """Encoder and decoder without a head. With `mesh=None` the model is not split."""

    drops_padding = False  # Local attention counts positions with padding.


class LongT5ForConditionalGeneration(LongT5Backbone, T5ForConditionalGeneration, GenerationMixin):
    """LongT5 that answers a text with another one."""


class LongT5Model(LongT5Backbone, T5Model):
    """LongT5 without a head."""


class LongT5EncoderModel(LongT5EncoderBackbone, T5EncoderModel):
    """The encoder of LongT5 without a head."""
