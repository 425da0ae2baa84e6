"""T5Gemma 2 (Zhang et al., 2025, "T5Gemma 2: Seeing, Reading, and Understanding Longer",
arXiv:2512.14856), an encoder-decoder of two Gemma 3s, without the part that reads images.

- the stacks of T5Gemma (see `models/t5gemma/model.py`), with the norms, windows and rotations of
  Gemma 3
- one attention in a block of the decoder: its queries share a softmax over the decoder's earlier
  tokens, which are rotated, and the encoder's output, which is not, with the same projections
- an even window reaches one token further behind a token of the encoder than before it
- both stacks and the head have one embedding; the token that ends an image has a vector of its own,
  which is not scaled
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...mpu import (
    checkpoint,
    context_rank,
    context_size,
    copy_to_tp,
    cut_sequence,
    gather_from_context,
    scatter_sequence,
    tp_size,
)
from ...mpu.dropout import AttentionPlace
from ..blocks.attention import (
    SelfAttention,
    attention_record,
    merge_heads,
    repeat_unequally,
    split_fused_heads,
)
from ..blocks.cache import Cache, LayerKVCache
from ..blocks.documents import Documents
from ..blocks.masks import AttentionMask, join_masks, masks_keys_only, window_mask
from ..blocks.padding import Tokens
from ..blocks.rotary import Rotary, rotate
from ..gemma.model import GemmaWordEmbedding
from ..gemma2.config import Gemma2Config
from ..generation.mixin import GenerationMixin
from ..heads import SequenceClassification
from ..language_model import VOCABULARY_MULTIPLE
from ..parallel_config import layer_arguments
from ..seq2seq import Seq2SeqStack
from ..t5gemma.model import (
    T5GemmaBackbone,
    T5GemmaBlock,
    T5GemmaForConditionalGeneration,
    T5GemmaForSequenceClassification,
    T5GemmaForTokenClassification,
    T5GemmaModel,
    T5GemmaStack,
)
from .config import T5Gemma2Config

# Images and positions that are given are refused.
T5GEMMA2_INPUTS = (
    "input_ids",
    "pixel_values",
    "attention_mask",
    "position_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
    "decoder_position_ids",
    "encoder_outputs",
)


class MergedAttention(SelfAttention):
    """Attention of a decoder's tokens to its earlier tokens and to the encoder's output.

    Both have the same projections, and one softmax. The encoder's output is not rotated.

    Attributes:
        source_length: The number of the encoder's positions in the call that is recorded.
    """

    source_length: int = 0

    def attend_with_source(
        self,
        x: Tensor,
        mask: Tensor | None,
        source: Tensor,
        rotary: Rotary,
        cache: LayerKVCache | None = None,
        source_cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Returns [B, S, H].

        Args:
            x: [B, S, H].
            mask: The mask of M + S own keys and T of the source, broadcastable to
                [B, Np, S, M + S + T], complete; None for all.
            source: The encoder's output [B, T, H].
            rotary: The rotation to the positions of x.
            cache: The keys and values of M earlier positions; those of x are appended to it.
            source_cache: The first call stores the source's keys and values in it, and later calls
                use them. With it, x may have n consecutive rows for each row of the source.
        """
        heads = self.heads["qkv"]
        q, k, v = split_fused_heads(self.qkv(x), heads, self.head_size)
        q, k, v = self.normalize(q, k, v)
        q, k = rotate(q, k, rotary)
        if cache is not None:
            k, v = cache.extend(k, v)
        if source_cache is not None and source_cache.length:
            source_k, source_v = source_cache.filled()
        else:
            _, source_k, source_v = split_fused_heads(self.qkv(source), heads, self.head_size)
            assert self.k_norm is not None
            source_k = self.k_norm(source_k)
            if source_cache is not None:
                source_k, source_v = source_cache.extend(source_k, source_v)
        copies = len(q) // len(source_k)
        if copies > 1:
            source_k = source_k.repeat_interleave(copies, 0)
            source_v = source_v.repeat_interleave(copies, 0)
        if context_size(self.core.mesh) > 1:
            attended = self.attend_to_gathered_keys(q, k, v, source_k, source_v, mask)
            return self.output(merge_heads(attended))
        if attention_record.probabilities is not None:
            self.source_length = source_k.shape[2]
        k = torch.cat([k, source_k], 2)
        v = torch.cat([v, source_v], 2)
        if mask is not None and mask.shape[-1] > k.shape[2]:
            mask = mask[..., -k.shape[2] :]  # of a cache that keeps a sliding window alone
        return self.output(merge_heads(self.core(q, k, v, mask, None, False)))

    def attend_to_gathered_keys(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        source_k: Tensor,
        source_v: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Returns the attention of this rank's positions, [B, Np, Sq, D], after it has got the keys
        and values of all context-parallel ranks.

        The order of the keys, on which dropout depends, is then that of one rank.
        """
        core = self.core

        def attend(
            q: Tensor, k: Tensor, v: Tensor, source_k: Tensor, source_v: Tensor, mask: Tensor | None
        ) -> Tensor:
            mesh = core.mesh
            gathered = [gather_from_context(part, mesh, 2) for part in (k, v, source_k, source_v)]
            if attention_record.probabilities is not None:
                self.source_length = gathered[2].shape[2]
            all_k = torch.cat([gathered[0], gathered[2]], 2)
            all_v = torch.cat([gathered[1], gathered[3]], 2)
            if core.queries_per_kv:
                all_k = repeat_unequally(all_k, core.queries_per_kv)
                all_v = repeat_unequally(all_v, core.queries_per_kv)
            if mask is not None and mask.shape[-2] > 1:
                mask = cut_sequence(mask, mesh, -2)
            place = AttentionPlace(q.shape[1], 0, context_rank(mesh) * q.shape[2])
            return core.attend_locally(q, all_k, all_v, mask, None, False, place)

        if core.recompute and torch.is_grad_enabled():
            # The backward pass gathers again, so that no rank keeps what it has received.
            return checkpoint(attend, q, k, v, source_k, source_v, mask)
        return attend(q, k, v, source_k, source_v, mask)

    def gather_probabilities(self, recorded: Tensor) -> Tensor:
        """Returns the probabilities of a decoder's own keys, for all heads [B, N, Sq, Sk]."""
        own = recorded.shape[-1] - self.source_length
        return super().gather_probabilities(recorded)[..., :own]


class SourceProbabilities:
    """Reads the probabilities of the encoder's positions out of those of merged attention.

    It stands for a block's cross-attention where probabilities are collected.
    """

    def __init__(self, attention: MergedAttention) -> None:
        self.attention = attention
        self.core = attention.core

    def gather_probabilities(self, recorded: Tensor) -> Tensor:
        """Returns them for all heads, [B, N, Sq, T]."""
        own = recorded.shape[-1] - self.attention.source_length
        return self.core.gather_heads(recorded)[..., own:]


class T5Gemma2Block(T5GemmaBlock):
    """One layer of the encoder or of the decoder."""

    attends_separately: ClassVar[bool] = False

    @classmethod
    def build_attention(
        cls, stack: Gemma2Config, is_decoder: bool, **arguments: Any
    ) -> SelfAttention:
        kind = MergedAttention if is_decoder else SelfAttention
        return kind(
            stack.hidden_size,
            stack.num_attention_heads,
            qk_norm_eps=stack.rms_norm_eps,
            norm_offset=stack.norm_offset,
            **arguments,
        )

    def attend(
        self,
        y: Tensor,
        mask: Tensor | Documents | None,
        rotary: Rotary,
        source: Tensor | None,
        cache: LayerKVCache | None,
        source_cache: LayerKVCache | None,
    ) -> Tensor:
        if source is None:
            return super().attend(y, mask, rotary, source, cache, source_cache)
        merged = cast(MergedAttention, self.attention)
        own_mask = cast("Tensor | None", mask)  # as the stack has made it
        return merged.attend_with_source(y, own_mask, source, rotary, cache, source_cache)

    @property
    def cross_attention(self) -> SourceProbabilities:  # type: ignore[override] - a module of T5Gemma
        """The part of a decoder's attention that sees the encoder's output."""
        if not isinstance(self.attention, MergedAttention):
            raise AttributeError("an encoder's block has no cross-attention")
        return SourceProbabilities(self.attention)


class T5Gemma2Stack(T5GemmaStack):
    """The encoder or the decoder."""

    block_class: ClassVar[type[T5GemmaBlock]] = T5Gemma2Block
    shares_embedding: ClassVar[bool] = True

    def embed(
        self, words: Tensor, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> Tensor:
        return self.embedding_dropout(words)

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
        cached = 0 if cache is None else cache.length
        masks = dict(self.find_masks(mask, ids, cached, pieces))
        if source is not None:
            length = source.shape[1] * context_size(self.mesh)
            if self.sequence_parallel:
                length *= tp_size(self.mesh)
            for window, own in masks.items():
                masks[window] = merge_masks(own, source_mask, ids, cached, length)
        arguments = (cast(Any, masks), source, None, cache, pieces)
        return Seq2SeqStack.forward(self, x, ids, *arguments)

    def make_window_mask(
        self, given: Tensor | None, ids: Tensor, cached: int, window: int, pieces: Tensor | None
    ) -> Tensor | Documents | None:
        if self.is_decoder:
            return super().make_window_mask(given, ids, cached, window, pieces)
        length = ids.shape[1]
        mask = window_mask(
            given, length, cached, window // 2, causal=False, device=ids.device, pieces=pieces
        )
        is_complete = given is not None and not masks_keys_only(given)
        if window % 2 or length <= window // 2 or is_complete:
            return mask
        # An even window has a token less before a token than behind it.
        places = torch.arange(length, device=ids.device)
        inside = places[:, None] - places < window // 2
        return join_masks(inside, mask.to_tensor() if isinstance(mask, Documents) else mask)


def merge_masks(
    own: Tensor | Documents | None,
    source: Tensor | Tokens | Documents | None,
    ids: Tensor,
    cached: int,
    source_length: int,
) -> Tensor | None:
    """Returns the complete mask of a decoder's own keys and of the encoder's positions behind them,
    broadcastable to [B, N, S, M + S + T]; None for all.

    Args:
        own: The mask of the decoder's M + S keys for causal attention.
        source: The mask of the encoder's positions, with a row for each sample of the encoder.
        ids: int64 [B, S], or embeddings [B, S, H].
        cached: M, the number of earlier positions.
        source_length: T.
    """
    rows, queries = ids.shape[:2]
    if isinstance(own, Documents):
        own = own.to_tensor()
    rules = AttentionMask.from_arguments(own, causal=True, queries=queries)
    own = rules.to_tensor(queries, cached + queries, ids.device)
    if isinstance(source, Documents):
        source = source.to_tensor()
    elif isinstance(source, Tokens):
        source = source.mask
    if own is None and source is None:
        return None
    if own is None:
        own = ids.new_ones(1, 1, 1, cached + queries, dtype=torch.bool)
    if source is None:
        source = ids.new_ones(1, 1, 1, source_length, dtype=torch.bool)
    own = own if own.dim() == 4 else own[None, None]
    if 1 < len(source) < rows:  # several sequences are decoded for each sample
        source = source.repeat_interleave(rows // len(source), 0)
    if own.dtype != source.dtype:
        own, source = _add_in(own, source.dtype), _add_in(source, own.dtype)
    shape = (max(len(own), len(source)), max(own.shape[1], source.shape[1]), queries, -1)
    return torch.cat([own.expand(shape), source.expand(shape)], -1)


def _add_in(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask that is added to the scores, from a bool one in another type."""
    if mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
        ~mask, float("-inf")
    )


class T5Gemma2WordEmbedding(GemmaWordEmbedding):
    """Gemma's word embedding, in which the token that ends an image has a vector of its own.

    Args:
        eoi_token_index: That token. The other arguments are those of `VocabParallelEmbedding`.

    Attributes:
        eoi_embedding: Its vector [H], replicated, which is not scaled.
    """

    def __init__(self, *sizes: int, eoi_token_index: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.eoi_token_index = eoi_token_index
        self.eoi_embedding = nn.Parameter(torch.full((self.embedding_dim,), float("nan")))

    def forward(self, ids: Tensor) -> Tensor:
        return self.place_ends(super().forward(ids), ids)

    def place_ends(self, x: Tensor, ids: Tensor) -> Tensor:
        """Returns the scaled embeddings x with the vector of the token in its places.

        Args:
            x: [B, S, H], or this rank's part of the sequence.
            ids: int64 [B, S], whole on each rank.
        """
        ids = cut_sequence(ids, self.mesh)
        vector: Tensor = self.eoi_embedding
        if self.sequence_parallel:
            ids = scatter_sequence(ids, self.mesh)
            vector = copy_to_tp(vector, self.mesh)
        is_end = ids == self.eoi_token_index
        return torch.where(is_end[..., None], vector.to(x.dtype), x)


class T5Gemma2Backbone(T5GemmaBackbone):
    """Encoder and decoder without a head."""

    stack_class: ClassVar[type[T5GemmaStack]] = T5Gemma2Stack
    positional_inputs = (
        *T5GEMMA2_INPUTS,
        "past_key_values",
        "inputs_embeds",
        "decoder_inputs_embeds",
    )

    def add_stacks(self) -> None:
        config = cast(T5Gemma2Config, self.config)
        stack = config.encoder_config
        self.word_embeddings = T5Gemma2WordEmbedding(
            stack.vocab_size,
            stack.hidden_size,
            eoi_token_index=config.eoi_token_index,
            pad_multiple=VOCABULARY_MULTIPLE,
            padding_idx=stack.padding_idx,
            **layer_arguments(self.mesh, self.parallel_config),
        )
        arguments = self.mesh, self.parallel_config
        self.encoder = self.stack_class(self.config, False, *arguments)
        self.decoder = self.stack_class(self.config, True, *arguments)

    def embed_for(
        self, stack: Seq2SeqStack, ids: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x, table = super().embed_for(stack, ids, table)
        if ids.is_floating_point():  # the caller has called the embedding
            return x, table
        embedding = cast(T5Gemma2WordEmbedding, self.word_embeddings)
        return embedding.place_ends(embedding.scale(x), ids), table

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        if name.endswith("eoi_embedding"):
            full.zero_()
        else:
            super().initialize_parameter(name, full, generator)


class T5Gemma2ForConditionalGeneration(
    T5Gemma2Backbone, T5GemmaForConditionalGeneration, GenerationMixin
):
    """T5Gemma 2 that answers a text with another one."""


class T5Gemma2Model(T5Gemma2Backbone, T5GemmaModel):
    """T5Gemma 2 without a head."""


class T5Gemma2ForSequenceClassification(T5Gemma2Backbone, T5GemmaForSequenceClassification):
    """T5Gemma 2 that classifies a text, by the decoder's state at the last token that it reads."""

    positional_inputs = (*T5GEMMA2_INPUTS, "inputs_embeds", "decoder_inputs_embeds")

    def pool(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        read = input_ids
        if not input_ids.is_floating_point():
            read = self.prepare_decoder_input_ids_from_labels(input_ids)
        return SequenceClassification.pool(self, x, read, attention_mask)


class T5Gemma2ForTokenClassification(T5Gemma2Backbone, T5GemmaForTokenClassification):
    """T5Gemma 2 that classifies each token, by the decoder's states of a source that it reads."""

    positional_inputs = (*T5GEMMA2_INPUTS, "inputs_embeds", "decoder_inputs_embeds")
