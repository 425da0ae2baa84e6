"""A global pointer, which scores every span of a sequence for every kind of entity (Su et al., 2022,
arXiv:2208.03054, "Global Pointer: Novel Efficient Span-based Approach for Named Entity
Recognition").

A linear layer makes a query and a key of D features of each token for each kind. Both are rotated
to their positions, so that a score depends on the length of the span too:

    score[kind, first, last] = (R_first query[first, kind]) · (R_last key[last, kind]) / √D

A span is an entity of a kind if its score is positive. Spans may overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rotary import rotary_embedding, rotate

IMPOSSIBLE = -1e12
"""The score of a span that ends before it begins, or that has padding at an end."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def score_spans(features: Tensor, kinds: int, kept: Tensor) -> Tensor:
    """Returns the scores of the spans, fp32 or fp64 [B, C, S, S]: first token, then last token.

    Args:
        features: [B, S, C · 2 · D]; for each kind of entity the query's D features and the key's.
            D is even: features 2i and 2i + 1 rotate together.
        kinds: C.
        kept: bool [B, S], the tokens that are not padding.
    """
    batch, length, width = features.shape
    size = width // (2 * kinds)  # D
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    queries, keys = wide.view(batch, length, kinds, 2, size).permute(3, 0, 2, 1, 4)  # [B, C, S, D]
    positions = torch.arange(length, device=features.device)[None]
    rotary = rotary_embedding(positions, size, _ROPE, length, wide.dtype, interleaved=True)
    queries, keys = rotate(queries, keys, rotary)
    scores = queries @ keys.transpose(2, 3) / size**0.5  # [B, C, S, S]
    both_kept = kept[:, :, None] & kept[:, None, :]
    return scores.masked_fill(~both_kept.triu()[:, None], IMPOSSIBLE)


def span_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of each text and kind, [B, C].

    Every span that is an entity shall have a score above 0, and every other one a score below:

        log(1 + Σ over entities exp(-score)) + log(1 + Σ over others exp(score))

    Args:
        scores: [B, C, S, S]; see `score_spans`.
        labels: [B, C, S, S], 1 for the spans that are entities, else 0.

    Raises:
        ValueError: The labels have another shape.
    """
    if labels.shape != scores.shape:
        raise ValueError(
            f"a global pointer needs labels of shape {tuple(scores.shape)}, which are 1 where an "
            f"entity of a kind begins and ends, not {tuple(labels.shape)}"
        )
    is_entity = (labels != 0).flatten(2)
    scores = scores.flatten(2)
    zero = scores.new_zeros(scores.shape[:2])[..., None]  # the 1 within the logarithm
    others = torch.cat([scores.masked_fill(is_entity, -torch.inf), zero], -1)
    entities = torch.cat([(-scores).masked_fill(~is_entity, -torch.inf), zero], -1)
    return entities.logsumexp(-1) + others.logsumexp(-1)
