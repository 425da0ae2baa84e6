"""Translates the attention masks that GLM accepts: part A attends to all of part A, part B
causally.
"""

from __future__ import annotations

from torch import Tensor

from ..blocks.documents import Documents


def visible_keys(
    attention_mask: Tensor | None, batch: int, queries: int, memory: int
) -> tuple[Tensor | None, bool]:
    """Returns (bool mask broadcastable to [B, N, S, M + S], prefixes [B] or None; whether attention
    is causal).

    B is `batch`. S = `queries` new positions follow M = `memory` cached positions.

    Args:
        attention_mask: One of the following; of a longer mask the last M + S columns are used.
            - None: causal attention.
            - Numbers [B], [1], [B, 1] or a scalar, the length of part A: all queries attend to
              memory and to part A, and the queries of part B also to themselves and to earlier
              positions of part B.
            - [B, ≥ M + S]: nonzero for the keys that every query attends to.
            - [B or 1, N or 1, S or 1, ≥ M + S]: nonzero where a query attends to a key.
    """
    if attention_mask is None:
        return None, True
    shape = attention_mask.shape
    keys = memory + queries
    fits = not shape or shape[0] in (1, batch)
    if fits and (len(shape) < 2 or shape[1:] == (1,)):
        return (attention_mask.reshape(-1).long() + memory).expand(batch), True
    if fits and len(shape) == 2 and shape[1] >= keys:
        return attention_mask.bool()[:, None, None, -keys:], False
    if fits and len(shape) == 4 and shape[2] in (1, queries) and shape[3] >= keys:
        return attention_mask.bool()[..., -keys:], False
    raise ValueError(
        f"attention_mask has shape {tuple(shape)}; for {batch} x {queries} tokens after {memory} "
        "cached ones use "
        f"[{batch}] (the length of part A), [{batch}, {keys}] or [{batch}, 1, {queries}, {keys}]"
    )


def visible_in_documents(
    seq_idx: Tensor, prefix_lengths: Tensor | None, attention_mask: Tensor | None
) -> Documents:
    """Returns the rules of packed rows, in which tokens attend within their document: all of it to
    its part A, and part B causally.

    Args:
        seq_idx, prefix_lengths: int64 [B or 1, S], the number of each token's document and the
            length of that document's part A; 0 by default.

    Raises:
        ValueError: There is a mask, or the lengths have another shape.
    """
    if attention_mask is not None:
        raise ValueError(
            "attention_mask is for rows of one document; with seq_idx, prefix_lengths [B, S] says how "
            "long part A of each token's document is"
        )
    if prefix_lengths is not None and prefix_lengths.shape != seq_idx.shape:
        raise ValueError(
            f"prefix_lengths has shape {tuple(prefix_lengths.shape)}; use that of seq_idx, "
            f"{tuple(seq_idx.shape)}: the length of part A of each token's document"
        )
    return Documents(seq_idx, None, causal=True, prefixes=prefix_lengths)
