"""Makes the masks of attention: bool, broadcastable to [B, N, Sq, Sk], True where a query attends to a key.

None means that every query attends to every key, or with `causal=True` in attention's call, to all but the later ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Returns the mask of bidirectional attention and cross-attention, which excludes padding.

    Args:
        attention_mask: None; or [B, Sk], nonzero for tokens and 0 for padding, as in transformers; or a complete mask
            [B or 1, N or 1, Sq, Sk], nonzero where a query attends to a key.

    Raises:
        ValueError: The shape is another one, or a 4-D mask has floats, which may be meant to be added.
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
    """Returns the mask of causal attention over `cached` earlier positions and the S new ones, [B, 1, S, cached + S].

    The result is None if `attention_mask` is None: there is no padding. A 2-D `attention_mask` is [B, cached + S]; a
    complete mask is returned unchanged. See `key_mask`.
    """
    keys = key_mask(attention_mask)
    if attention_mask is None or keys is None or attention_mask.dim() == 4:
        return keys
    return lower_triangular_mask(sequence_length, cached + sequence_length, keys.device) & keys


def window_mask(
    attention_mask: Tensor | None, sequence_length: int, cached: int, window: int, *, causal: bool, device: torch.device
) -> Tensor | None:
    """Returns the mask of attention within a window, over `cached` earlier positions and the S new ones.

    As in transformers, the window counts padding too, and a complete mask is returned unchanged (see `key_mask`). The
    result is None if there is no padding and the window excludes nothing.

    Args:
        attention_mask: As in `causal_mask`.
        window: If causal, each position attends to itself and to the `window - 1` positions before it (the
            `sliding_window` of Mistral and Qwen); else to the positions at most `window` away on either side.
        device: Where the mask is made if `attention_mask` is None.
    """
    keys, total = key_mask(attention_mask), cached + sequence_length
    if attention_mask is not None and attention_mask.dim() == 4:
        return keys
    reach = window if causal else window + 1  # the positions on one side, this one included
    if total <= reach:
        return causal_mask(attention_mask, sequence_length, cached) if causal else keys
    places = torch.arange(total, device=device if keys is None else keys.device)
    distance = places[cached:, None] - places  # [S, cached + S]
    inside = (distance >= 0) & (distance < reach) if causal else distance.abs() < reach
    return inside if keys is None else inside & keys


def lower_triangular_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns bool [Sq, Sk]: each query attends to its own and earlier positions; the last query is at the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
