"""Makes the masks that say which keys a query attends to.

An attention mask is bool and broadcastable to [B, N, Sq, Sk]. True means that the query attends to
the key, and None stands for True everywhere. A complete mask may be in floating point instead, which
is added to the scaled scores. With `causal=True` in attention's call, a query does
not attend to later keys, unless the mask has a row for each query: such a mask is complete. In
place of a mask, int64 [B] with `causal=True` is the length of each sample's prefix, whose keys
every query attends to.
"""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.device import can_overwrite_gradients
from .documents import CrossDocuments, Documents
from .padding import Tokens


def number_pieces(cu_seq_lens: Tensor, length: int) -> Tensor:
    """Returns the number of the piece that each token of a packed row belongs to, int64 [1, S].

    Args:
        cu_seq_lens: The cumulative lengths of the pieces, [n + 1], of which the first is 0.
        length: The row's length S.
    """
    places = torch.arange(length, device=cu_seq_lens.device)
    return torch.bucketize(places, cu_seq_lens[1:].long(), right=True)[None]


def find_pieces(
    seq_idx: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    is_cached: bool,
) -> Tensor | None:
    """Returns the number of the piece that each token of packed rows belongs to, [B or 1, S], or
    None if each row is one sequence.

    As in transformers, pieces are found by position ids that do not continue, if there is neither a
    mask nor a cache.

    Args:
        seq_idx: The result, if the caller gives it.
        position_ids: int64 [B or 1, S].

    Raises:
        ValueError: `seq_idx` is given with a cache.
    """
    if seq_idx is not None:
        if is_cached:
            raise ValueError(
                "seq_idx packs whole sequences into a row: it needs a call without a cache"
            )
        return seq_idx
    if position_ids is None or attention_mask is not None or is_cached:
        return None
    begins = position_ids[:, 1:] != position_ids[:, :-1] + 1
    # A compiler cannot trace a decision that depends on data; it gets the mask of one piece then.
    if can_overwrite_gradients() and not begins.any():
        return None
    return F.pad(begins.cumsum(1), (1, 0))


def restart_positions(seq_idx: Tensor, counted: Tensor | None = None) -> Tensor:
    """Returns each token's position within its piece, from 0 on, int64 [B or 1, S].

    Args:
        seq_idx: The number of each token's piece, [B or 1, S].
        counted: Which tokens have a position of their own, bool [B, S]; by default all.
    """
    begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
    if counted is None:
        counted = torch.ones_like(begins)
    before = counted.cumsum(1) - counted.long()  # the counted tokens before each token of the row
    skipped = torch.where(begins, before, 0).cummax(1).values
    return before - skipped


def are_in_one_piece(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns bool [B or 1, 1, Sq, Sk], whether a query and a key belong to the same piece.

    Args:
        queries, keys: The numbers of their pieces, [B or 1, Sq] and [B or 1, Sk].
    """
    return queries[:, None, :, None] == keys[:, None, None, :]


@overload
def key_mask(attention_mask: Tensor | None) -> Tensor | None: ...


@overload
def key_mask(
    attention_mask: Tensor | None, pieces: Tensor | None, queries: Tensor | None = None
) -> Tensor | Documents | None: ...


def key_mask(
    attention_mask: Tensor | None, pieces: Tensor | None = None, queries: Tensor | None = None
) -> Tensor | Documents | None:
    """Returns the mask of bidirectional attention and cross-attention, which excludes padding.

    Args:
        attention_mask: None; or [B, Sk], nonzero for tokens and 0 for padding, as in transformers;
            or a complete mask [B, Sq, Sk] or [B or 1, N or 1, Sq, Sk], nonzero where a query
            attends to a key, or in floating point with four dimensions, which is added to the
            scores.
        pieces: The number of each key's piece in packed rows, [B or 1, Sk]. Queries attend to the
            keys of their own piece only, as `Documents` or a complete mask says.
        queries: The same of the queries, if they are other tokens than the keys.

    Raises:
        ValueError: The shape is another one.
    """
    if pieces is not None:
        keys = key_mask(attention_mask)
        if masks_keys_only(attention_mask):
            if queries is None:
                return Documents(pieces, keys, causal=False)
            return CrossDocuments(queries, pieces, keys)
        same = are_in_one_piece(pieces if queries is None else queries, pieces)
        return join_masks(same, keys)
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2:
        return attention_mask.bool()[:, None, None, :]
    if attention_mask.dim() == 3:
        return attention_mask.bool()[:, None]
    if attention_mask.dim() == 4:
        return attention_mask if attention_mask.is_floating_point() else attention_mask.bool()
    raise ValueError(
        "attention_mask must be [B, S], 0 for padding; [B, Sq, Sk] or [B, N, Sq, Sk], 0 where not "
        "attended; or [B, N, Sq, Sk] in floating point, which is added; got "
        f"{attention_mask.dtype} {tuple(attention_mask.shape)}"
    )


def join_masks(allowed: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the mask of what both allow. The first one is bool."""
    if mask is None:
        return allowed
    if mask.is_floating_point():
        return mask.masked_fill(~allowed, float("-inf"))
    return allowed & mask


def masks_keys_only(attention_mask: Tensor | None) -> bool:
    """Returns whether a mask in a call of `key_mask` says at most which keys are padding."""
    return attention_mask is None or attention_mask.dim() == 2


def split_mask(
    mask: Tensor | Tokens | Documents | None,
) -> tuple[Tokens | None, Tensor | Documents | None]:
    """Returns the tokens, if they stand for the mask, and the mask."""
    if isinstance(mask, Tokens):
        return mask, mask.mask
    return None, mask


def causal_mask(
    attention_mask: Tensor | None, sequence_length: int, pieces: Tensor | None = None
) -> Tensor | Documents | None:
    """Returns the mask for S queries and `causal=True`: None, of the keys [B, 1, 1, Sk], or a
    complete one; of pieces, `Documents` wherever `attention_mask` is not complete.

    See `key_mask` for `attention_mask` and `pieces`.
    """
    keys = key_mask(attention_mask)
    is_complete = not masks_keys_only(attention_mask)
    if pieces is not None and not is_complete:
        return Documents(pieces, keys, causal=True)
    if keys is not None and is_complete:
        keys = keys.expand(-1, -1, sequence_length, -1)
    if pieces is None:
        return keys
    return join_masks(are_in_one_piece(pieces, pieces), keys)


def window_mask(
    attention_mask: Tensor | None,
    sequence_length: int,
    cached: int,
    window: int,
    *,
    causal: bool,
    device: torch.device,
    pieces: Tensor | None = None,
) -> Tensor | Documents | None:
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
        pieces: As in `causal_mask`.
    """
    reach = window if causal else window + 1  # the positions on one side, this one included
    keys = key_mask(attention_mask)
    if pieces is not None and masks_keys_only(attention_mask):
        return Documents(pieces, keys, causal=causal, reach=reach)
    if not masks_keys_only(attention_mask):
        if causal and pieces is not None:
            return causal_mask(attention_mask, sequence_length, pieces)
        return key_mask(attention_mask, pieces)
    total = cached + sequence_length
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
