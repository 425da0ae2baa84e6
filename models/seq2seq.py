"""Provides what encoder-decoders share: how their stacks follow each other, and their language-modeling head."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..mpu import dropout_state
from ..ops.library import is_watched
from .blocks.cache import Cache
from .blocks.masks import causal_mask, key_mask
from .blocks.padding import Tokens
from .blocks.stack import run_blocks
from .language_model import IGNORED, Backbone, BackboneOutput, Head, LanguageModel, vocabulary_head
from .outputs import EncoderOutput, Seq2SeqLMOutput

MIN_PADDING = (
    1 / 8
)  # of the positions; with less, the copies at attention take more memory than the rows save


class Stack(nn.Module):
    """Base of the stacks, encoder or decoder: what is before the blocks, `blocks`, and what is after them."""

    blocks: nn.ModuleList
    recompute_blocks: bool

    def embed(self, words: Tensor, ids: Tensor, cached: int) -> Tensor:
        """Returns the first block's input, in the shape of the words.

        Args:
            words: Word embeddings [B, S, H], or [B, S/tp, H] under sequence parallelism.
            ids: int64 [B, S].
            cached: The number of earlier positions.
        """
        raise NotImplementedError

    def finish(self, x: Tensor) -> Tensor:
        """Returns the stack's output from the last block's."""
        raise NotImplementedError

    def context(self, ids: Tensor, cached: int) -> tuple[Any, ...]:
        """Returns what all blocks get between `mask` and `source`."""
        return ()

    def forward(
        self,
        words: Tensor,
        ids: Tensor,
        mask: Tensor | Tokens | None,
        source: Tensor | None = None,
        source_mask: Tensor | Tokens | None = None,
        cache: Cache | None = None,
    ) -> list[Tensor]:
        """Returns the first block's input and each block's output, the last one as `finish` returns it.

        They are [B, S, H] like the words, or [T, 1, H] if `Tokens` stand for the mask.

        Args:
            words, ids: See `embed`.
            mask, source_mask: See `SelfAttention` and `CrossAttention`.
            source: The encoder's output, for a decoder.
        """
        cached = 0 if cache is None else cache.length
        shared = (mask, *self.context(ids, cached), source, source_mask)
        with without_padding(self.embed(words, ids, cached), mask) as x:
            states = run_blocks(
                self.blocks,
                x,
                lambda i: (
                    *shared,
                    cache and cache.layers[i],
                    cache.sources[i] if cache and cache.sources else None,
                ),
                self.recompute_blocks,
            )
            states[-1] = self.finish(states[-1])
        return states


@contextmanager
def without_padding(x: Tensor, mask: Tensor | Tokens | None) -> Generator[Tensor]:
    """Yields x [B, S, H], or the rows of its tokens if they stand for the mask. Dropout within knows which they are."""
    if not isinstance(mask, Tokens):
        yield x
        return
    samples, positions = mask.rows // mask.mask.shape[-1], mask.rows % mask.mask.shape[-1]
    with dropout_state.rows_of(len(mask.mask), samples, positions):
        yield mask.unpad(x)


def find_tokens(mask: Tensor | None, ids: Tensor, blocks: nn.ModuleList) -> Tensor | Tokens | None:
    """Returns the tokens that stand for the mask of an encoder's keys in training, or the mask itself.

    They do on a CPU if enough of the batch is padding. Compiled code and pipeline stages need shapes that do not depend
    on the batch.

    Args:
        ids: [B, S].
    """
    if mask is None or not mask.is_cpu or mask.shape != (len(ids), 1, 1, ids.shape[-1]):
        return mask
    fixed = hasattr(blocks, "part") or any(
        getattr(block, "_compiled_call_impl", None) for block in blocks
    )
    if fixed or not blocks.training or not torch.is_grad_enabled() or is_watched():
        return mask
    is_token = mask.flatten()
    rows, padding = is_token.nonzero()[:, 0], (~is_token).nonzero()[:, 0]
    if not len(rows) or len(padding) < MIN_PADDING * len(is_token):
        return mask
    return Tokens(mask, rows, padding, (is_token.cumsum(0) - 1).clamp(min=0))


class Seq2SeqBackbone(Backbone):
    """Base of the encoder-decoders, without a head, whose stacks share the word embedding.

    `config` has `pad_token_id` and `decoder_start_token_id`.
    """

    encoder: Stack
    decoder: Stack

    def run_backbone(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: EncoderOutput | tuple[Tensor, ...] | None = None,
        cache: Cache | None = None,
    ) -> BackboneOutput:
        """Runs both stacks.

        Args:
            input_ids: int64 [B, S].
            attention_mask: [B, S], 0 for padding.
            decoder_input_ids: int64 [B, T]; by default input_ids, shifted right by one.
            decoder_attention_mask: [B, T], or [B, M + T] with a cache; 0 for padding.
            encoder_outputs: The result of `encode`, instead of input_ids.
            cache: The keys and values of M earlier decoder positions and of the encoder's output; not supported under
                sequence parallelism. With a cache, the decoder may have n rows for each row of the encoder.
        """
        if decoder_input_ids is None:
            if input_ids is None:
                raise ValueError(
                    "pass decoder_input_ids, or labels to a model with a language-modeling head"
                )
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(input_ids)
        source_mask = key_mask(attention_mask)
        if encoder_outputs is None:
            if input_ids is not None and not self.parallel_config.sequence_parallel:
                source_mask = find_tokens(source_mask, input_ids, self.encoder.blocks)
            encoder_states, table = self.run_encoder(input_ids, source_mask)
        else:
            encoder_states, table = [self.scatter_hidden_states(encoder_outputs[0])], None
        words, table = self.word_embeddings.embed(decoder_input_ids, table)
        mask = causal_mask(decoder_attention_mask, decoder_input_ids.shape[1])
        states = self.decoder(
            words, decoder_input_ids, mask, encoder_states[-1], source_mask, cache
        )
        return BackboneOutput(
            states, table, encoder_states, source_mask if isinstance(source_mask, Tokens) else None
        )

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> EncoderOutput:
        """Returns the encoder's output, for step-by-step decoding."""
        states, _ = self.run_encoder(input_ids, key_mask(attention_mask))
        return EncoderOutput(
            self.gather_hidden_states(states[-1]),
            self.gather_all_hidden_states(states) if output_hidden_states else None,
        )

    def run_encoder(
        self, input_ids: Tensor | None, mask: Tensor | Tokens | None
    ) -> tuple[list[Tensor], Tensor]:
        """Returns the states of the encoder, as the mask says, and the word embedding table for its next use."""
        if input_ids is None:
            raise ValueError("pass input_ids, or the encoder_outputs of an earlier call")
        words, table = self.word_embeddings.embed(input_ids)
        return self.encoder(words, input_ids, mask), table

    @property
    def shared(self) -> nn.Module:
        """The word embedding of both stacks, by transformers' name of T5."""
        return self.word_embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns int64 [B, T]: the start token, then all labels but the last. -100 becomes padding."""
        ids = labels.roll(1, dims=1)
        ids[:, 0] = self.config.decoder_start_token_id
        return ids.masked_fill(ids == IGNORED, self.config.pad_token_id)

    def head_input(self, x: Tensor) -> Tensor:
        """Returns what the language-modeling head multiplies, from the decoder's output."""
        return x


class Seq2SeqLM(Head, LanguageModel, Seq2SeqBackbone):
    """Predicts the label at each position of the decoder; for encoder-decoders.

    The head is the word embedding if the configuration ties them.
    """

    generates = "answer"

    def add_head(self) -> None:
        self.head = vocabulary_head(self)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: EncoderOutput | tuple[Tensor, ...] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Seq2SeqLMOutput:
        """Returns the logits and, with labels, the mean loss, or the summed loss divided by `num_items_in_batch`.

        Args:
            decoder_input_ids: int64 [B, T]; by default the labels, shifted right by one.
            labels: int64 [B, T]; -100 is ignored.
            logits_to_keep: The number of last decoder positions whose logits are returned; 0 means all.

        The other arguments are those of `Seq2SeqBackbone.run_backbone`.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("pass labels, or decoder_input_ids for logits without a loss")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        hidden = self.run_backbone(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            cache,
        )
        x = self.head_input(hidden.states[-1][:, -logits_to_keep:])  # [B, T, H], or [B, T/tp, H]
        loss, logits = self.loss_and_logits(self.head, x, labels, num_items_in_batch, hidden.table)
        given = {} if encoder_outputs is None else {"encoder_hidden_states": None}
        return Seq2SeqLMOutput(
            loss, logits, **{**self.shown_states(hidden, output_hidden_states), **given}
        )
