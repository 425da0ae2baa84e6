"""Attention masks: bool, True where a query sees a key, broadcastable to [B, N, Sq, Sk]; None where all see all."""

from __future__ import annotations

import torch
from torch import Tensor


def key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """What bidirectional attention and cross-attention see: None without padding, else every key but the padding.

    attention_mask: [B, Sk], nonzero for tokens and 0 for padding, as in transformers; or [B or 1, N or 1, Sq, Sk],
    a finished mask, nonzero where attended. ValueError for other shapes and for a 4-D mask of floats, which may be
    meant to be added.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2:
        return attention_mask.bool()[:, None, None, :]
    if attention_mask.dim() == 4 and not attention_mask.is_floating_point():
        return attention_mask.bool()
    raise ValueError(
        "attention_mask must be [B, S], 0 for padding, or a bool or integer [B, N, Sq, Sk], 0 where not attended; "
        f"got {attention_mask.dtype} {tuple(attention_mask.shape)}"
    )


def causal_mask(attention_mask: Tensor | None, sequence_length: int, cached: int = 0) -> Tensor | None:
    """What the S queries of a causal model see of themselves and of the `cached` positions before them: None without
    padding, else bool [B, 1, S, cached + S]. `attention_mask` is as in `key_mask`, [B, cached + S], and a finished
    mask is taken as it is."""
    keys = key_mask(attention_mask)
    if attention_mask is None or keys is None or attention_mask.dim() == 4:
        return keys
    return lower_triangular_mask(sequence_length, cached + sequence_length, keys.device) & keys


def lower_triangular_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [Sq, Sk]: each query sees its own position and those before it; the last query is at the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
