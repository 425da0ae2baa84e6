"""Generates texts from texts, with one call for models of the zoo and of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.pairs.datasets import truncate_with_begin, truncate_with_end
from ..generation.filling import fill_blanks
from ..models.generation.decoders import Decoder
from ..models.generation.generate import (
    Extras,
    evaluating,
    find_device,
    search,
    sequences_per_prompt,
)
from ..models.generation.generation_config import resolve_settings
from ..models.generation.prompts import pad_prompts
from .data import TextTokenizer
from .loading import ModelSource


class TextGenerator:
    """Generates the answers of an encoder-decoder, or a decoder's continuations of its prompts.

    Args:
        positions: The maximum number of tokens that the model reads; None if it is unlimited.
        max_source_length: Maximum tokens of a source, as in training.
        batch_size: Sources that are decoded together.
        blanks: The texts of a family that fills blanks.
        segments: Whether an encoder has `token_type_ids`.
        is_chat: Whether the sources have the tokens that begin a text already.
    """

    def __init__(
        self,
        source: ModelSource,
        tokenizer: TextTokenizer,
        *,
        positions: int | None,
        max_source_length: int,
        max_new_tokens: int,
        num_beams: int,
        batch_size: int,
        blanks: Any = None,
        segments: bool = False,
        is_chat: bool = False,
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.positions = positions
        self.max_source_length = max_source_length
        self.batch_size = batch_size
        self.blanks = blanks
        self.segments = segments
        self.is_chat = is_chat
        self.defaults = {"max_new_tokens": max_new_tokens, "num_beams": num_beams}
        self.never_generated: list[int] = []

    def __call__(self, model: Any, sources: Sequence[str], **settings: Any) -> list[str]:
        """Returns `num_return_sequences` texts for each source.

        `settings` are those of `generate`.
        """
        if self.never_generated:
            suppressed = [*(settings.get("suppress_tokens") or []), *self.never_generated]
            settings = {**settings, "suppress_tokens": suppressed}
        texts: list[str] = []
        for start in range(0, len(sources), self.batch_size):
            texts += self._generate(model, sources[start : start + self.batch_size], settings)
        return texts

    def _generate(self, model: Any, sources: Sequence[str], given: dict[str, Any]) -> list[str]:
        if self.blanks is not None:
            ids, mask = pad_prompts(
                [self.blanks.encode(text) for text in sources], self.blanks.tokens.pad
            )
            settings = {**self.defaults, **given}
            found = fill_blanks(model, ids, self.blanks.tokens, mask, **settings)
            return [self.blanks.decode(one.pieces[0]) for one in found]
        if self.source.shape == "encoder":
            texts: list[str] = []
            for source in sources:
                texts += self._complete(model, source, given)
            return texts
        answers = self.source.shape == "encoder-decoder"
        rows = self._encode(sources, answers)
        for text, row in zip(sources, rows, strict=True):
            if not row:
                raise ValueError(f"the text {text!r} has no tokens")
        pad = self._find_padding(model)
        # An encoder's input is padded as in training.
        ids, mask = pad_prompts(rows, pad, left=not answers)
        settings = {**self.defaults, "pad_token_id": pad, **given}
        if "max_length" in given and "max_new_tokens" not in given:
            del settings["max_new_tokens"]
        elif not answers and self.positions is not None and "max_new_tokens" not in given:
            room = self.positions - ids.shape[1] + 1
            settings["max_new_tokens"] = max(1, min(settings["max_new_tokens"], room))
        device = next(model.parameters()).device
        if settings.get("num_beam_groups", 1) > 1 and not self.source.native:
            found = generate_in_groups(model, ids, mask, settings)
        else:
            settings["return_dict_in_generate"] = False
            with evaluating(model):
                found = model.generate(
                    input_ids=ids.to(device), attention_mask=mask.to(device), **settings
                )
        if not answers:
            found = found[:, ids.shape[1] :]
        return self.tokenizer.backend.batch_decode(found.tolist(), skip_special_tokens=True)

    def _complete(self, model: Any, source: str, given: dict[str, Any]) -> list[str]:
        """Returns the second parts that an encoder generates after `[CLS] source [SEP]` (UniLM)."""
        cls, sep = self.tokenizer.ends
        row = truncate_with_end([cls, *self.tokenizer.encode(source)], self.max_source_length, sep)
        prompt = torch.from_numpy(row)[None].to(next(model.parameters()).device)  # [1, S]
        settings = {
            **self.defaults,
            "pad_token_id": self._find_padding(model),
            "eos_token_id": sep,
            **given,
        }
        made = resolve_settings(model, None, settings)
        with evaluating(model), torch.inference_mode():
            decoder = PrefixDecoder(model, len(row), self.segments, sequences_per_prompt(made))
            limit = made.length_limit(len(row))
            found = search(decoder, prompt, limit, made, Extras()).sequences
        return self.tokenizer.backend.batch_decode(
            found[:, len(row) :].tolist(), skip_special_tokens=True
        )

    def _encode(self, sources: Sequence[str], answers: bool) -> list[list[int]]:
        """Encodes sources as the samples of training are encoded."""
        begin = [] if self.is_chat else self.tokenizer.begin
        rows = self.tokenizer.encode_batch(list(sources))
        length = self.max_source_length
        if answers:
            end = self.tokenizer.eos_token_id
            return [truncate_with_end(begin + row, length, end).tolist() for row in rows]
        return [truncate_with_begin(row, length, begin).tolist() for row in rows]

    def _find_padding(self, model: Any) -> int:
        """Returns a token of the vocabulary to pad with."""
        config = model.config
        stored = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
        for known in (*stored, self.tokenizer.backend.pad_token_id):
            if isinstance(known, int) and 0 <= known < model.config.vocab_size:
                return known
        return 0


class TransformersDecoder(Decoder):
    """Decodes with a transformers model and its own cache.

    Args:
        mask: int64 [B, S], the attention mask of the prompts.
        encoded: The encoder's output for the prompts; None for a decoder, whose prompts are padded
            on the left.
    """

    def __init__(self, model: Any, mask: Tensor, encoded: Any, copies: int) -> None:
        super().__init__(unsplit(model), 0, copies, None)
        self.inner = model
        self.mask = mask
        self.encoded = encoded
        self.past: Any = None

    def next_logits(self, ids: Tensor, cached: int, kept: int) -> Tensor:
        cached = 0 if self.past is None else int(self.past.get_seq_length())
        inputs: dict[str, Any] = {"past_key_values": self.past, "use_cache": True}
        if self.encoded is not None:
            inputs |= {"encoder_outputs": self.encoded, "attention_mask": self.mask}
            output = self.inner(decoder_input_ids=ids[:, cached:], **inputs)
        else:
            mask = F.pad(self.mask, (0, ids.shape[1] - self.mask.shape[1]), value=1)  # [R, T]
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, cached:]
            output = self.inner(
                ids[:, cached:], attention_mask=mask, position_ids=positions, **inputs
            )
        self.past = output.past_key_values
        return output.logits[:, -kept:]

    def repeat_rows(self) -> None:
        self.past.batch_repeat_interleave(self.copies)
        self.mask = self.mask.repeat_interleave(self.copies, 0)
        if self.encoded is not None:
            self.encoded.last_hidden_state = self.encoded.last_hidden_state.repeat_interleave(
                self.copies, 0
            )

    def select(self, rows: Tensor) -> None:
        self.past.reorder_cache(rows)


class PrefixDecoder(Decoder):
    """Decodes with an encoder that attends to a prefix, and causally to what follows it, without a
    cache.
    """

    def __init__(self, model: Any, prefix: int, segments: bool, copies: int) -> None:
        is_native = hasattr(model, "mesh")
        super().__init__(model if is_native else unsplit(model), 0, copies, None)
        self.inner = model
        self.prefix = prefix
        self.segments = segments

    def next_logits(self, ids: Tensor, cached: int, kept: int) -> Tensor:
        rows, length = ids.shape
        places = torch.arange(length, device=ids.device)
        visible = (places < self.prefix) | (places <= places[:, None])  # [T, T]
        inputs = {"attention_mask": visible.expand(rows, 1, -1, -1)}
        if self.segments:
            inputs["token_type_ids"] = (places >= self.prefix).long().expand(rows, -1)
        return self.last_logits(self.inner(ids, **inputs))[:, -kept:]


def unsplit(model: Any) -> Any:
    """Returns the attributes of a model that a search needs: the vocabulary size, and that it is
    not split.
    """
    width = model.get_output_embeddings().weight.shape[0]
    return SimpleNamespace(config=SimpleNamespace(vocab_size=width), mesh=None)


def generate_in_groups(model: Any, ids: Tensor, mask: Tensor, settings: dict[str, Any]) -> Tensor:
    """Decodes by diverse beam search; returns int64 [B · num_return_sequences, T], as the zoo's
    `generate` does.
    """
    made = resolve_settings(model, None, settings)
    with evaluating(model), torch.inference_mode():
        ids = ids.to(find_device(model))
        mask = mask.to(find_device(model))
        encoded = None
        prompt = ids
        visible = mask
        if model.config.is_encoder_decoder:
            encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)
            start = made.decoder_start_token_id
            if start is None:
                start = made.bos_token_id
            prompt = torch.full((len(ids), 1), start or 0, device=ids.device)
            visible = None
        decoder = TransformersDecoder(model, mask, encoded, made.num_beams)
        limit = made.length_limit(prompt.shape[1])
        found = search(
            decoder,
            prompt,
            limit,
            made,
            Extras(),
            encoder_ids=None if encoded is None else ids,
            attention_mask=visible,
        )
    return found.sequences.clone()
