"""Provides what encoder-decoders share: how their stacks follow each other, and their
language-modeling head.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..mpu import VocabParallelEmbedding, broadcast_from_stage, context_size
from ..ops.device import host_can_read
from ..ops.dispatcher import is_watched
from .backbone import Backbone, Head
from .blocks.attention import attention_record
from .blocks.cache import Cache
from .blocks.documents import Documents
from .blocks.embeddings import embed_tokens
from .blocks.masks import causal_mask, find_pieces, key_mask
from .blocks.padding import Tokens
from .blocks.stack import BlockList
from .calls import keep_positions, rename_cache, take_cache
from .language_model import IGNORED, LanguageModel, TokenCount, count_mask, vocabulary_head
from .outputs import BackboneOutput, BaseModelOutput, EncoderOutput, Seq2SeqLMOutput, StageOutput
from .pipeline import find_stage

# The share of padding from which leaving it out pays. With less, the copies around attention take
# more memory than the rows save.
MIN_PADDING = 1 / 8

# The arguments of a call with which those of every encoder-decoder of transformers begin.
SEQ2SEQ_INPUTS = (
    "input_ids",
    "attention_mask",
    "decoder_input_ids",
    "decoder_attention_mask",
    "encoder_outputs",
)


class Seq2SeqStack(nn.Module):
    """Base of the encoders and decoders: what is before the blocks, the blocks, and what is after
    them.
    """

    blocks: BlockList
    word_embeddings: VocabParallelEmbedding | None

    def __init__(self) -> None:
        super().__init__()
        # Most stacks use the model's embedding; a family may give them their own.
        self.word_embeddings = None

    def embed(
        self, words: Tensor, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> Tensor:
        """Returns the first block's input, in the shape of the words.

        Args:
            words: Word embeddings [B, S, H], or [B, S/tp, H] under sequence parallelism.
            ids: int64 [B, S], or embeddings [B, S, H].
            cached: The number of earlier positions.
            pieces: The number of each token's piece in packed rows, [B or 1, S].
        """
        raise NotImplementedError

    def finish(self, x: Tensor) -> Tensor:
        """Returns the stack's output from the last block's."""
        raise NotImplementedError

    def shared_arguments(
        self, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Returns what all blocks get between `mask` and `source`. See `embed` for the arguments."""
        return ()

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        mask: Tensor | Tokens | Documents | None,
        source: Tensor | None = None,
        source_mask: Tensor | Tokens | Documents | None = None,
        cache: Cache | None = None,
        pieces: Tensor | None = None,
    ) -> list[Tensor]:
        """Runs this pipeline stage's part of the stack; without a pipeline, all of it.

        Args:
            x: The word embeddings [B, S, H]; on a pipeline stage without the stack's first block,
                the hidden states that an earlier stage has computed.
            ids: int64 [B, S], or embeddings [B, S, H] that the words are.
            mask, source_mask: See `SelfAttention` and `CrossAttention`.
            source: The encoder's output, for a decoder.
            pieces: See `embed`.

        Returns:
            The input of the stage's first block, and each block's output, the stack's last one as
            `finish` returns it. They are [B, S, H] like x, or [T, 1, H] if `Tokens` stand for the
            mask.
        """
        cached = 0 if cache is None else cache.length
        shared = (mask, *self.shared_arguments(ids, cached, pieces), source, source_mask)

        def block_arguments(layer: int) -> tuple[Any, ...]:
            if cache is None:
                return (*shared, None, None)
            source_cache = cache.sources[layer] if cache.sources else None
            return (*shared, cache.layers[layer], source_cache)

        if self.blocks.has_first:
            x = self.embed(x, ids, cached, pieces)
        with without_padding(x, mask) as rows:
            states = self.blocks.run(rows, block_arguments)
            if self.blocks.has_last:
                states[-1] = self.finish(states[-1])
        return states


@contextmanager
def without_padding(x: Tensor, mask: Tensor | Tokens | Documents | None) -> Generator[Tensor]:
    """Yields x [B, S, H], or the rows of its tokens if they stand for the mask.

    Dropout within knows which they are.
    """
    if not isinstance(mask, Tokens):
        yield x
        return
    with mask.naming_rows():
        yield mask.unpad(x)


def find_tokens(
    mask: Tensor | Documents | None,
    ids: Tensor,
    blocks: BlockList,
    token_count: TokenCount | None = None,
) -> Tensor | Tokens | Documents | None:
    """Returns the tokens that stand for the mask of an encoder's keys in training, or the mask
    itself.

    They do if enough of the batch is padding. Compiled code needs shapes that do not depend on the
    batch.

    Args:
        ids: [B, S], or embeddings [B, S, H].
        token_count: From `note_token_count`. The host would have to wait for an accelerator to
            learn it.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return mask
    if token_count is None and not host_can_read(mask):
        return mask
    if attention_record.probabilities is not None:
        return mask  # what is recorded should be part of the graph, with padding
    if mask.shape != (len(ids), 1, 1, ids.shape[1]):
        return mask
    if blocks.is_compiled:
        return mask
    if not blocks.training or not torch.is_grad_enabled() or is_watched():
        return mask
    is_token = mask.flatten()
    if token_count is None:
        token_count = count_mask(mask[:, 0, 0])
    count, pads_right = token_count
    if not count or len(is_token) - count < MIN_PADDING * len(is_token):
        return mask
    rows = torch.nonzero_static(is_token, size=count)[:, 0]
    padding = torch.nonzero_static(~is_token, size=len(is_token) - count)[:, 0]
    counted = is_token.cumsum(0)
    starts: Tensor | None = None
    if pads_right:
        starts = F.pad(counted[ids.shape[1] - 1 :: ids.shape[1]], (1, 0))
    return Tokens(mask, rows, padding, (counted - 1).clamp(min=0), starts)


class EncoderBackbone(Backbone):
    """Base of the encoders of encoder-decoders, without a head."""

    positional_inputs = ("input_ids", "attention_mask", "inputs_embeds")
    encoder: Seq2SeqStack

    def run_backbone(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        seq_idx: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the encoder, or this pipeline stage's part of it.

        Args:
            input_ids: int64 [B, S], or embeddings [B, S, H].
            attention_mask: [B, S], 0 for padding.
            seq_idx: int64 [B, S] or [1, S], the number of each token's piece in packed rows, which
                attends to itself alone.
        """
        if self.encoder.blocks.has_first:
            x, table = embed_tokens(self.word_embeddings, input_ids)
        else:
            x = self.receive_hidden_states()
            table = None
        mask = key_mask(attention_mask, seq_idx)
        states = self.encoder(x, input_ids, mask, pieces=seq_idx)
        if not self.encoder.blocks.has_last:
            return self.send_hidden_states(states[-1])
        return BackboneOutput(states, table)


class Seq2SeqBackbone(Backbone):
    """Base of the encoder-decoders, without a head, whose stacks share the word embedding.

    In a pipeline, the blocks of the encoder and then those of the decoder lie in a row of stages.
    From the encoder's last stage on, its output travels along, behind the decoder's hidden states.

    `config` has `pad_token_id` and `decoder_start_token_id`.
    """

    positional_inputs = (
        *SEQ2SEQ_INPUTS,
        "past_key_values",
        "inputs_embeds",
        "decoder_inputs_embeds",
    )
    encoder: Seq2SeqStack
    decoder: Seq2SeqStack
    drops_padding: ClassVar[bool] = True
    """Whether an encoder may leave out the padding of a batch in training."""

    @property
    def attends_to_encoder(self) -> bool:
        return True

    def run_backbone(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Any, ...] | None = None,
        cache: Cache | None = None,
        *,
        seq_idx: Tensor | None = None,
        decoder_seq_idx: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs both stacks, or this pipeline stage's part of them.

        | the stage has                            | receives        | hands over      |
        |------------------------------------------|-----------------|-----------------|
        | all blocks                               | -               | -               |
        | the encoder's first blocks               | -               | encoder         |
        | the encoder's next or last blocks        | encoder         | encoder         |
        | the encoder's last, the decoder's first  | encoder, or -   | decoder, encoder |
        | the decoder's first blocks               | encoder         | decoder, encoder |
        | the decoder's next blocks                | decoder, encoder | decoder, encoder |
        | the decoder's last blocks                | decoder, encoder | -               |

        With `encoder_outputs`, stages of the encoder do nothing, and those of the decoder exchange
        its hidden states alone.

        Args:
            input_ids: int64 [B, S], or embeddings [B, S, H].
            attention_mask: [B, S], 0 for padding.
            decoder_input_ids: int64 [B, T], or embeddings [B, T, H]; by default input_ids, shifted
                right by one.
            decoder_attention_mask: [B, T], or [B, M + T] with a cache; 0 for padding.
            encoder_outputs: The encoder's output [B, S, H], and what else is known of it, instead
                of input_ids; see `read_encoder_outputs`.
            cache: The keys and values of M earlier decoder positions and of the encoder's output;
                not supported under sequence parallelism. With a cache, the decoder may have n rows
                for each row of the encoder.
            seq_idx, decoder_seq_idx: int64 [B or 1, S] and [B or 1, T], the number of each token's
                piece in packed rows. A piece of the decoder attends to itself and to the encoder's
                piece of the same number. Give both or neither, with decoder_input_ids.
        """
        if (seq_idx is None) != (decoder_seq_idx is None):
            raise ValueError("packed rows need both seq_idx and decoder_seq_idx")
        pieces = find_pieces(decoder_seq_idx, None, decoder_attention_mask, cache is not None)
        if decoder_input_ids is None:
            if input_ids is None or input_ids.is_floating_point():
                raise ValueError(
                    "pass decoder_input_ids, or labels to a model with a language-modeling head"
                )
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(input_ids)
        source_mask = key_mask(attention_mask, seq_idx)
        cross_mask = source_mask
        if seq_idx is not None:
            cross_mask = key_mask(attention_mask, seq_idx, decoder_seq_idx)
        encoder_blocks = self.encoder.blocks
        decoder_blocks = self.decoder.blocks
        table = None
        hidden = None  # the decoder's hidden states, if an earlier stage has begun it

        # The encoder: run it, take its output from an earlier stage, or take what the caller gives.
        if encoder_outputs is not None:
            encoder_states = [self.scatter_hidden_states(encoder_outputs[0])]
            if decoder_blocks.own and not decoder_blocks.has_first:
                hidden = self.receive_hidden_states()
        elif encoder_blocks.own:
            # Stages exchange tensors whose shapes do not depend on how much of a batch is padding.
            is_whole = (
                self.drops_padding
                and self.stage is None
                and not self.parallel_config.sequence_parallel
                and context_size(self.mesh) == 1
            )
            if input_ids is not None and is_whole:
                token_count = getattr(attention_mask, "token_count", None)
                source_mask = find_tokens(source_mask, input_ids, encoder_blocks, token_count)
                if seq_idx is None:
                    cross_mask = source_mask
            encoder_states, table = self.run_encoder(input_ids, source_mask, seq_idx)
            if not encoder_blocks.has_last or not decoder_blocks.own:
                return self.send_hidden_states(encoder_states[-1])
        else:
            assert input_ids is not None
            received = self.receive_hidden_states()
            if not decoder_blocks.has_first:
                hidden, received = self._split_received(received, input_ids.shape[1])
            encoder_states = [received]

        # The decoder.
        if not decoder_blocks.own:
            return self.send_hidden_states()
        if hidden is None:
            hidden, table = self.embed_for(self.decoder, decoder_input_ids, table)
        mask = causal_mask(decoder_attention_mask, decoder_input_ids.shape[1], pieces)
        states = self.decoder(
            hidden, decoder_input_ids, mask, encoder_states[-1], cross_mask, cache, pieces
        )
        if not decoder_blocks.has_last:
            if encoder_outputs is not None:
                return self.send_hidden_states(states[-1])
            return self.send_hidden_states(states[-1], encoder_states[-1])
        tokens = source_mask if isinstance(source_mask, Tokens) else None
        return BackboneOutput(states, table, encoder_states, tokens)

    def _split_received(self, received: Tensor, source_length: int) -> tuple[Tensor, Tensor]:
        """Returns the decoder's hidden states and the encoder's output, which an earlier stage has
        joined.
        """
        if self.parallel_config.sequence_parallel and self.mesh is not None:
            source_length //= self.mesh.tp_size
        source_length //= context_size(self.mesh)
        hidden, source = torch.split(
            received, [received.shape[1] - source_length, source_length], dim=1
        )
        return hidden, source

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> EncoderOutput:
        """Returns the encoder's output, for step-by-step decoding; in a pipeline, on all stages."""
        mask = key_mask(attention_mask)
        if self.stage is not None:
            return self._encode_on_stages(input_ids, mask)
        states, _ = self.run_encoder(input_ids, mask)
        return EncoderOutput(
            self.gather_hidden_states(states[-1]),
            self.gather_all_hidden_states(states) if output_hidden_states else None,
        )

    def decode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        *,
        past_key_values: Any = None,
        cache: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> BaseModelOutput:
        """Returns the output of the decoder alone.

        Args:
            input_ids: int64 [B, T], or embeddings [B, T, H].
            attention_mask: [B, T], or [B, M + T] with a cache; 0 for padding.
            encoder_hidden_states: [B, S, H], whole on each rank. Without it, the decoder attends to
                its own positions alone.
            encoder_attention_mask: [B, S], 0 for padding.
            past_key_values: A cache of transformers with M earlier positions.
            cache: The same, by the name of transformers 5.24 and later.
            use_cache: Whether to extend it, or to make one.
        """
        if self.stage is not None:
            raise ValueError("the decoder alone needs a model without pipeline stages")
        named: dict[str, Any] = {"use_cache": use_cache}
        for name, value in (("past_key_values", past_key_values), ("cache", cache)):
            if value is not None:
                named[name] = value
        rename_cache(type(self), named)
        past = take_cache(self, named)
        source = None
        if encoder_hidden_states is not None:
            source = self.scatter_hidden_states(encoder_hidden_states)
        x, _ = self.embed_for(self.decoder, input_ids)
        mask = causal_mask(attention_mask, input_ids.shape[1])
        source_mask = key_mask(encoder_attention_mask)
        inputs = (x, input_ids, mask, source, source_mask, named.get("cache"))
        output = BaseModelOutput(past_key_values=past)
        if output_attentions:
            with attention_record.recording() as record:
                states = self.decoder(*inputs)
            blocks = self.decoder.blocks
            output.attentions = blocks.gather_attentions(record, "attention")
            output.cross_attentions = blocks.gather_attentions(record, "cross_attention")
        else:
            states = self.decoder(*inputs)
        output.last_hidden_state = self.gather_hidden_states(states[-1])
        if output_hidden_states:
            output.hidden_states = self.gather_all_hidden_states(states)
        return output

    def _encode_on_stages(self, input_ids: Tensor, mask: Tensor | None) -> EncoderOutput:
        """Runs the encoder through its stages, and broadcasts its output from the last of them."""
        assert self.stage is not None
        assert self.mesh is not None
        blocks = self.encoder.blocks
        output = None
        if blocks.own:
            states, _ = self.run_encoder(input_ids, mask)
            if blocks.has_last:
                output = self.gather_hidden_states(states[-1])
            else:
                self.send_hidden_states(states[-1])
        last = find_stage(len(blocks) - 1, self.stage.counts)
        return EncoderOutput(broadcast_from_stage(output, last, self.mesh))

    def run_encoder(
        self,
        input_ids: Tensor | None,
        mask: Tensor | Tokens | Documents | None,
        seq_idx: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Runs the encoder, or this pipeline stage's part of it.

        Returns:
            The encoder's states, [B, S, H], or [T, 1, H] if the mask is `Tokens`; and the word
            embedding table, for the decoder and the head.
        """
        if input_ids is None:
            raise ValueError("pass input_ids, or the encoder_outputs of an earlier call")
        if self.encoder.blocks.has_first:
            x, table = self.embed_for(self.encoder, input_ids)
        else:
            x = self.receive_hidden_states()
            table = None
        return self.encoder(x, input_ids, mask, pieces=seq_idx), table

    def embed_for(
        self, stack: Seq2SeqStack, ids: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the word embeddings of a stack's tokens, and the table for its next use; see
        `embed_tokens`.
        """
        if stack.word_embeddings is None:
            return embed_tokens(self.word_embeddings, ids, table)
        x, _ = embed_tokens(stack.word_embeddings, ids)
        return x, None  # Neither the other stack nor the head uses this one.

    @property
    def shared(self) -> nn.Module:
        """The word embedding of both stacks, by transformers' name of T5."""
        return self.word_embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns int64 [B, T]: the start token, then all labels but the last. -100 becomes
        padding.
        """
        pad_token_id = self.find_padding_of_labels()
        ids = labels.roll(1, dims=1)
        ids[:, 0].fill_(self.config.decoder_start_token_id)
        return ids.masked_fill(ids == IGNORED, pad_token_id)

    def find_padding_of_labels(self) -> int:
        """Returns the id that the decoder reads where labels are -100.

        Raises:
            ValueError: The configuration has no padding token.
        """
        pad_token_id = self.config.pad_token_id
        if pad_token_id is None:
            raise ValueError(
                "the decoder reads padding where labels are -100, so pad_token_id must be set in "
                "the configuration, or decoder_input_ids be given"
            )
        return pad_token_id

    def head_input(self, x: Tensor) -> Tensor:
        """Returns what the language-modeling head multiplies, from the decoder's output."""
        return x


class Seq2SeqLM(Head, LanguageModel, Seq2SeqBackbone):
    """Predicts the label at each position of the decoder; for encoder-decoders.

    The head is the word embedding if the configuration ties them.
    """

    generates = "answer"
    label_names = ("labels",)

    @property
    def decoder_blocks(self) -> BlockList:
        return self.decoder.blocks

    def add_head(self) -> None:
        self.head = vocabulary_head(self)

    def compute_outputs(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: tuple[Any, ...] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        cache: Cache | None = None,
        logits_to_keep: Tensor | int = 0,
        seq_idx: Tensor | None = None,
        decoder_seq_idx: Tensor | None = None,
    ) -> Seq2SeqLMOutput | StageOutput:
        """Returns the logits and, with labels, the mean loss, or the summed loss divided by
        `num_items_in_batch`.

        Args:
            decoder_input_ids: int64 [B, T]; by default the labels, shifted right by one.
            labels: int64 [B, T]; -100 is ignored.
            logits_to_keep: The decoder positions whose logits are returned; see `keep_positions`.

        The other arguments are those of `Seq2SeqBackbone.run_backbone`.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("pass labels, or decoder_input_ids for logits without a loss")
            if decoder_seq_idx is not None:
                raise ValueError(
                    "packed rows need decoder_input_ids: each piece begins with a token of its own"
                )
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        hidden = self.run_backbone(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            cache,
            seq_idx=seq_idx,
            decoder_seq_idx=decoder_seq_idx,
        )
        if isinstance(hidden, StageOutput):
            return hidden
        x = keep_positions(hidden.states[-1], logits_to_keep)  # [B, T, H], or [B, T/tp, H]
        x = self.head_input(x)
        loss, logits = self.loss_and_logits(self.head, x, labels, num_items_in_batch, hidden.table)
        states = self.collect_hidden_states(hidden, output_hidden_states)
        if encoder_outputs is not None:
            states["encoder_hidden_states"] = encoder_outputs[1]
        return Seq2SeqLMOutput(loss, logits, **states)
