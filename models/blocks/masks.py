"""Makes the masks that say which keys a query attends to.

An attention mask is bool and broadcastable to [B, N, Sq, Sk]. True means that the query attends to
the key, and None stands for True everywhere. With `causal=True` in attention's call, a query does
not attend to later keys, unless the mask has a row for each query: such a mask is complete. In
place of a mask, int64 [B] with `causal=True` is the length of each sample's prefix, whose keys
every query attends to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .padding import Tokens


def key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Returns the mask of bidirectional attention and cross-attention, which excludes padding.

    Args:
        attention_mask: None; or [B, Sk], nonzero for tokens and 0 for padding, as in transformers;
            or a complete mask [B or 1, N or 1, Sq, Sk], nonzero where a query attends to a key.

    Raises:
        ValueError: The shape is another one, or a 4-D mask has floats, which may be meant to be
            added.
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


def split_mask(mask: Tensor | Tokens | None) -> tuple[Tokens | None, Tensor | None]:
    """Returns the tokens, if they stand for the mask, and the mask."""
    return (mask, mask.mask) if isinstance(mask, Tokens) else (None, mask)


def causal_mask(attention_mask: Tensor | None, sequence_length: int) -> Tensor | None:
    """Returns the mask for S queries and `causal=True`: None, of the keys [B, 1, 1, Sk], or a
    complete one.

    See `key_mask` for `attention_mask`.
    """
    keys = key_mask(attention_mask)
    if keys is None or attention_mask is None or attention_mask.dim() == 2:
        return keys
    return keys.expand(-1, -1, sequence_length, -1)


def window_mask(
    attention_mask: Tensor | None,
    sequence_length: int,
    cached: int,
    window: int,
    *,
    causal: bool,
    device: torch.device,
) -> Tensor | None:
    """Returns the mask of attention within a window, over `cached` earlier positions and the S new
    ones.

    As in transformers, the window counts padding too, and a complete mask is returned unchanged
    (see `key_mask`). The result is None if there is no padding and the window excludes nothing.

    Args:
        attention_mask: As in `causal_mask`.
        window: If causal, each position attends to itself and to the `window - 1` positions before
            it (the `sliding_window` of Mistral and Qwen); else to the positions at most `window`
            away on either side.
        device: Where the mask is made if `attention_mask` is None.
    """
    keys = key_mask(attention_mask)
    total = cached + sequence_length
    if attention_mask is not None and attention_mask.dim() == 4:
        return keys
    reach = window if causal else window + 1  # the positions on one side, this one included
    if total <= reach:
        return keys
    places = torch.arange(total, device=device if keys is None else keys.device)
    distance = places[cached:, None] - places  # [S, cached + S]
    if causal:
        inside = (distance >= 0) & (distance < reach)
    else:
        inside = distance.abs() < reach
    return inside if keys is None else inside & keys


def lower_triangular_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns bool [Sq, Sk]: each query attends to its own and earlier positions; the last query is
    at the last key.
    """
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class AttentionMask(NamedTuple):
    """The rules for which keys a query attends to. The fields are as in `ops.attention`."""

    mask: Tensor | None = None
    causal: bool = False
    prefix: Tensor | None = None

    @classmethod
    def from_arguments(cls, mask: Tensor | None, causal: bool, queries: int) -> AttentionMask:
        """Returns the rules of a mask or prefixes; see the top of the file."""
        causal = causal and queries > 1  # the last query attends to every key
        if mask is not None and mask.dim() == 1:
            return cls(None, causal, mask if causal else None)
        return cls(mask, causal and (mask is None or mask.shape[-2] == 1))

    def to_tensor(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Returns all rules as one mask, broadcastable to [B, N, Sq, Sk]; None stands for True
        everywhere.
        """
        if not self.causal:
            return self.mask
        mask = lower_triangular_mask(queries, keys, device)
        if self.prefix is not None:
            is_in_prefix = torch.arange(keys, device=device) < self.prefix.reshape(-1, 1, 1, 1)
            mask = mask | is_in_prefix
        return mask if self.mask is None else mask & self.mask
