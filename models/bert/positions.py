"""Where an encoder's tokens stand."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import BertConfig


def position_ids_of(input_ids: Tensor, config: BertConfig) -> Tensor:
    """int64 [1, S], or [B, S] where padding has a position of its own.

    Then the other tokens count on from it, wherever the padding is: cumsum(token is not padding) + padding position,
    as in fairseq and transformers. Raises `ValueError` for more tokens than positions.
    """
    length = input_ids.shape[1]
    if length > config.max_sequence_length:
        raise ValueError(f"the sequence has {length} tokens, but the model only {config.max_sequence_length} positions")
    if config.position_padding_idx is None:
        return torch.arange(length, device=input_ids.device)[None]
    is_token = input_ids != config.pad_token_id
    return is_token.cumsum(1) * is_token + config.position_padding_idx
