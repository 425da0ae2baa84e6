"""Computes the next token's logits for each kind of model, with or without a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...mpu import broadcast_from_stage
from ..blocks.cache import Cache, TransformersCache
from ..blocks.masks import lower_triangular_mask
from ..calls import make_cache
from ..outputs import EncoderOutput
from .outputs import StepRecord
from .vocabulary import mask_padding


class Decoder(ABC):
    """Computes the logits of the next token, for sequences that grow from call to call.

    Args:
        layers: Number of the model's blocks that read the generated tokens.
        copies: Sequences for each prompt, in consecutive rows. The prompt itself is processed once.
        capacity: Number of positions in the cache; None for no cache.
        source_length: Number of positions of the encoder's output.
        past: A cache of transformers with earlier positions, which is used and extended instead.

    Attributes:
        record: Where the states of the forward passes are kept; None if nobody asked for them.
    """

    record: StepRecord | None = None

    def __init__(
        self,
        model: Any,
        layers: int,
        copies: int,
        capacity: int | None,
        source_length: int | None = None,
        past: Any = None,
    ) -> None:
        self.model = model
        self.copies = copies
        self.cache: Cache | None = None
        if past is not None:
            has_sources = source_length is not None
            past = make_cache(past, has_sources=has_sources)
            self.cache = TransformersCache(past, layers, has_sources=has_sources)
        elif capacity is not None:
            self.cache = Cache(layers, capacity, source_length)
        self.is_first = True

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns fp32 [R, Vp], this rank's columns; -inf in the padding of the vocabulary.

        Args:
            ids: int64 [R, T], all tokens so far. Only `select` may change the order of rows between
                calls.
        """
        cached = 0 if self.cache is None else self.cache.length
        if self.is_first and self.copies > 1:
            # The copies of a prompt are equal until the first token is chosen.
            logits = self.next_logits(ids[:: self.copies], cached, 1)
            logits = logits.repeat_interleave(self.copies, 0)
            self.repeat_rows()
        else:
            logits = self.next_logits(ids, cached, 1)
        self.is_first = False
        return mask_padding(logits[:, -1], self.model.config.vocab_size, self.model.mesh)

    def verify(self, ids: Tensor, drafted: int) -> Tensor:
        """Returns the logits after each of the last `drafted` tokens of one sequence, and before
        them: fp32 [drafted + 1, Vp], as a call does.

        Args:
            ids: int64 [1, T], with the drafted tokens. The cache must have no position of theirs.
        """
        cached = 0 if self.cache is None else self.cache.length
        logits = self.next_logits(ids, cached, drafted + 1)
        self.is_first = False
        return mask_padding(logits[0], self.model.config.vocab_size, self.model.mesh)

    def crop(self, length: int) -> None:
        """Forgets the positions after the first `length`."""
        if self.cache is not None:
            self.cache.crop(length)

    @property
    def forward_options(self) -> dict[str, Any]:
        """What the forward passes are asked for."""
        return {} if self.record is None else self.record.forward_options()

    @abstractmethod
    def next_logits(self, ids: Tensor, cached: int, kept: int) -> Tensor:
        """Returns the logits [R, kept, Vp] of the last positions of ids [R, T], of which the first
        `cached` tokens are in the cache.
        """

    def last_logits(self, output: Any) -> Tensor:
        """Returns the logits of the output [R, kept, Vp], on each stage of a pipeline."""
        if self.record is not None:
            self.record.add_states(output, self.copies if self.is_first else 1)
        if getattr(self.model, "stage", None) is None:
            return output.logits
        logits = output.logits if self.model.stage.is_last else None
        return broadcast_from_stage(logits, self.model.stage.last, self.model.mesh)

    def repeat_rows(self) -> None:
        """Repeats each row of the state `copies` times, after the prompts were processed."""
        if self.cache is not None:
            self.cache.repeat(self.copies)

    def select(self, rows: Tensor) -> None:
        """Makes row i a continuation of the former row rows[i], which has the same prompt."""
        if self.cache is not None:
            self.cache.select(rows)


class CausalDecoder(Decoder):
    """Decodes with a causal language model.

    Args:
        attention_mask: int64 [B, T0] of the prompts; None without padding.
        position_ids: int64 [B or 1, T0] of the prompts; by default their tokens are counted. New
            tokens count up from the last one.
        token_type_ids: int64 [B, T0] of the prompts, for a model that has token types. New tokens
            have the type of the last one.
        embeddings: [B, T0, H], what is read instead of the prompts' tokens. It needs a cache.
        before: The number of positions before the first id of a call: T0 if the prompts are
            embeddings alone.
    """

    def __init__(
        self,
        model: Any,
        attention_mask: Tensor | None,
        *,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        embeddings: Tensor | None = None,
        before: int = 0,
        copies: int = 1,
        capacity: int | None,
        past: Any = None,
    ) -> None:
        super().__init__(model, len(model.decoder_blocks), copies, capacity, past=past)
        self.before = before
        self.mask = attention_mask
        self.positions = position_ids
        self.types = token_type_ids
        self.embeddings = embeddings
        if position_ids is None and attention_mask is not None:
            # As in transformers, padding has position 0, on whichever side it is.
            self.positions = (attention_mask.cumsum(1) - 1) * attention_mask

    def next_logits(self, ids: Tensor, cached: int, kept: int) -> Tensor:
        options = self.forward_options
        mask = None
        positions = None
        length = self.before + ids.shape[1]
        if self.mask is not None:
            mask = F.pad(self.mask, (0, length - self.mask.shape[1]), value=1)  # [R, T]
        if self.positions is not None:
            last = self.positions[:, -1:]
            steps = torch.arange(1, length - self.positions.shape[1] + 1, device=ids.device)
            positions = torch.cat([self.positions, last + steps], 1)[:, cached:]
        if self.types is not None:
            new = self.types[:, -1:].expand(-1, length - self.types.shape[1])
            options["token_type_ids"] = torch.cat([self.types, new], 1)[:, cached:]
        if self.embeddings is not None and self.is_first:
            options["inputs_embeds"] = self.embeddings[:, cached:]
        else:
            options["input_ids"] = ids[:, cached - self.before :]
        output = self.model(
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=False,  # none of transformers
            logits_to_keep=kept,
            **options,
        )
        return self.last_logits(output)

    def repeat_rows(self) -> None:
        super().repeat_rows()
        if self.mask is not None:
            self.mask = self.mask.repeat_interleave(self.copies, 0)
        if self.positions is not None and len(self.positions) > 1:
            self.positions = self.positions.repeat_interleave(self.copies, 0)
        if self.types is not None:
            self.types = self.types.repeat_interleave(self.copies, 0)


class Seq2SeqDecoder(Decoder):
    """Decodes with an encoder-decoder.

    Args:
        encoded: The encoder's output for B prompts.
        attention_mask: int64 [B, S] of the encoder's input, or None.
        decoder_mask: [B, T0] of the beginning of the decoder's sequence, or None.
    """

    def __init__(
        self,
        model: Any,
        encoded: EncoderOutput,
        attention_mask: Tensor | None,
        decoder_mask: Tensor | None = None,
        *,
        copies: int = 1,
        capacity: int | None,
        past: Any = None,
    ) -> None:
        length = encoded.last_hidden_state.shape[1]
        super().__init__(model, len(model.decoder_blocks), copies, capacity, length, past)
        self.encoded = encoded
        self.mask = attention_mask
        self.decoder_mask = decoder_mask

    def next_logits(self, ids: Tensor, cached: int, kept: int) -> Tensor:
        mask = self.decoder_mask
        if mask is not None:
            mask = F.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)  # [R, T]
        output = self.model(
            attention_mask=self.mask,
            decoder_input_ids=ids[:, cached:],
            decoder_attention_mask=mask,
            encoder_outputs=self.encoded,
            cache=self.cache,
            use_cache=False,  # none of transformers
            logits_to_keep=kept,
            **self.forward_options,
        )
        return self.last_logits(output)

    def repeat_rows(self) -> None:
        super().repeat_rows()
        if self.decoder_mask is not None:
            self.decoder_mask = self.decoder_mask.repeat_interleave(self.copies, 0)


class BlankDecoder(Decoder):
    """Fills one blank of each row with a GLM. The prompts end with the token that starts a piece.

    Args:
        positions: int64 [B, 2, T0] of the prompts: position in the text, and within the span. For
            new tokens the first stays that of the prompt's last token, and the second counts up.
        visible: bool [B, T0, T0], the keys that each query of the prompt attends to.
    """

    def __init__(
        self,
        model: Any,
        positions: Tensor,
        visible: Tensor,
        *,
        copies: int = 1,
        capacity: int | None,
    ) -> None:
        super().__init__(model, len(model.decoder_blocks), copies, capacity)
        self.positions = positions
        self.visible = visible

    def next_logits(self, ids: Tensor, cached: int, kept: int) -> Tensor:
        length = ids.shape[1]
        prompt = self.visible.shape[1]
        steps = torch.arange(1, length - prompt + 1, device=ids.device)
        last = self.positions[:, :, -1:]
        new_positions = [last[:, 0].expand(-1, len(steps)), last[:, 1] + steps]
        later = torch.stack(new_positions, 1)  # [B, 2, T - T0]
        positions = torch.cat([self.positions, later], 2)[:, :, cached:]
        # A prompt's last token attends to all of the prompt except padding. New tokens attend to
        # the same, and causally to new tokens.
        keys = F.pad(self.visible[:, -1], (0, length - prompt), value=True)  # [B, T]
        causal = lower_triangular_mask(length - prompt, length, ids.device)
        new = causal & keys[:, None]  # [B, T - T0, T]
        whole = torch.cat([F.pad(self.visible, (0, length - prompt)), new], 1)  # [B, T, T]
        mask = whole[:, None, cached:]  # [B, 1, S, T]
        output = self.model(
            ids[:, cached:],
            positions,
            mask,
            cache=self.cache,
            logits_to_keep=kept,
            use_cache=False,
            **self.forward_options,
        )
        return self.last_logits(output)

    def repeat_rows(self) -> None:
        super().repeat_rows()
        self.positions = self.positions.repeat_interleave(self.copies, 0)
        self.visible = self.visible.repeat_interleave(self.copies, 0)
