"""Attention masks: bool, True where a query sees a key, broadcastable to [B, N, Sq, Sk]; None where all see all."""

from __future__ import annotations

import torch
from torch import Tensor


def key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """What bidirectional attention and cross-attention see: None without padding, else every key but the padding.

    attention_mask: [B, Sk], nonzero for tokens and 0 for padding, as in transformers; or bool [B or 1, N or 1, Sq,
    Sk], a finished mask. ValueError for another number of dimensions, or an additive mask.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2:
        return attention_mask.bool()[:, None, None, :]
    if attention_mask.dim() == 4 and attention_mask.dtype == torch.bool:
        return attention_mask
    raise ValueError(
        "attention_mask must be [B, S], 0 for padding, or bool [B, N, Sq, Sk], True where attended; "
        f"got {attention_mask.dtype} {tuple(attention_mask.shape)}"
    )


def causal_mask(attention_mask: Tensor | None, sequence_length: int) -> Tensor | None:
    """What a causal model's queries see: None without padding, else bool [B, 1, S, S]; `attention_mask` as in
    `key_mask`, and a finished mask is taken as it is."""
    keys = key_mask(attention_mask)
    if attention_mask is None or keys is None or attention_mask.dim() == 4:
        return keys
    return visible_before(sequence_length, sequence_length, keys.device) & keys


def visible_before(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [Sq, Sk]: each query sees its own position and those before it; the last query is at the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
