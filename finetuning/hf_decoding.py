"""Diverse beam search for transformers' models, which transformers itself only has as code from a hub."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..generation.api import Extras, device_of, evaluating, search
from ..generation.decoders import Decoder
from ..generation.settings import GenerationSettings, make_settings


class TransformersDecoder(Decoder):
    """Next tokens of a transformers model with its own cache. mask: int64 [B, S] of the prompts.

    encoded: of an encoder-decoder's prompts; None for a decoder, whose prompts are padded on the left.
    """

    def __init__(self, model: Any, mask: Tensor, encoded: Any, copies: int) -> None:
        super().__init__(unsplit(model), 0, copies, None)
        self.inner, self.mask, self.encoded = model, mask, encoded
        self.past: Any = None

    def next_logits(self, ids: Tensor, cached: int) -> Tensor:
        cached = 0 if self.past is None else int(self.past.get_seq_length())
        inputs: dict[str, Any] = {"past_key_values": self.past, "use_cache": True}
        if self.encoded is not None:
            inputs |= {"encoder_outputs": self.encoded, "attention_mask": self.mask}
            output = self.inner(decoder_input_ids=ids[:, cached:], **inputs)
        else:
            mask = F.pad(self.mask, (0, ids.shape[1] - self.mask.shape[1]), value=1)  # [R, T]
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, cached:]
            output = self.inner(ids[:, cached:], attention_mask=mask, position_ids=positions, **inputs)
        self.past = output.past_key_values
        return output.logits[:, -1]

    def repeat_rows(self) -> None:
        self.past.batch_repeat_interleave(self.copies)
        self.mask = self.mask.repeat_interleave(self.copies, 0)
        if self.encoded is not None:
            self.encoded.last_hidden_state = self.encoded.last_hidden_state.repeat_interleave(self.copies, 0)

    def select(self, rows: Tensor) -> None:
        self.past.reorder_cache(rows)


def unsplit(model: Any) -> Any:
    """What a search asks of a model: its vocabulary, and that it is whole."""
    width = model.get_output_embeddings().weight.shape[0]
    return SimpleNamespace(config=SimpleNamespace(vocab_size=width), mesh=None)


def generate_in_groups(model: Any, ids: Tensor, mask: Tensor, settings: dict[str, Any]) -> Tensor:
    """Sequences int64 [B · num_return_sequences, T] as `generate` of the zoo's models gives them."""
    made: GenerationSettings = make_settings(model.config, model.generation_config, settings)
    with evaluating(model), torch.inference_mode():
        ids, mask = ids.to(device_of(model)), mask.to(device_of(model))
        encoded, prompt, visible = None, ids, mask
        if model.config.is_encoder_decoder:
            encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)
            start = made.decoder_start_token_id if made.decoder_start_token_id is not None else made.bos_token_id
            prompt, visible = torch.full((len(ids), 1), start or 0, device=ids.device), None
        decoder = TransformersDecoder(model, mask, encoded, made.num_beams)
        limit = made.length_limit(prompt.shape[1])
        found = search(
            decoder, prompt, limit, made, Extras(), encoder_ids=None if encoded is None else ids, attention_mask=visible
        )
    return found.sequences.clone()
