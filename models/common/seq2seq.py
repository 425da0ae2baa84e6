"""Encoder-decoders that generate text: how the decoder's inputs follow from the labels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .language_model import IGNORED, LanguageModel


class Seq2SeqLM(LanguageModel):
    """Base of the encoder-decoders; the label at a position is what the decoder predicts there.

    `config` has `pad_token_id` and `decoder_start_token_id`.
    """

    config: Any
    generates = "answer"

    def decoder_inputs(self, decoder_input_ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """The given ids, else the labels moved one to the right. ValueError with neither."""
        if decoder_input_ids is not None:
            return decoder_input_ids
        if labels is None:
            raise ValueError("pass labels, or decoder_input_ids for logits without a loss")
        return self.prepare_decoder_input_ids_from_labels(labels)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """int64 [B, T]: the start token, then all labels but the last; -100 becomes padding."""
        ids = labels.roll(1, dims=1)
        ids[:, 0] = self.config.decoder_start_token_id
        return ids.masked_fill(ids == IGNORED, self.config.pad_token_id)
