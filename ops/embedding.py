"""Adds the gradients of looked-up rows to the gradient of an embedding's table.

The reference of the result is the gradient of `torch.nn.functional.embedding`. The gradient of a
table is often the largest tensor of a step, so it is added to in place.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .cpu.pool import empty_pooled


def add_embedding_gradient(
    total: Tensor | None, rows: Tensor, ids: Tensor, shape: tuple[int, ...], padding_idx: int | None
) -> Tensor:
    """Returns the table's gradient [V, H]: `total` plus the gradient of each looked-up row.

    It may overwrite `total`.

    Args:
        total: The table's gradient from its other uses, [V, H]; None for zeros.
        rows: The gradients of the rows, [..., H].
        ids: The rows' numbers, integers [...].
        shape: (V, H).
        padding_idx: A row that gets no gradient.
    """
    if not rows.is_cpu:
        # An accelerator's own kernel sums in a fixed order.
        skipped = -1 if padding_idx is None else padding_idx
        own = torch.ops.aten.embedding_dense_backward(rows, ids, shape[0], skipped, False)
        return own if total is None else total.add_(own)
    if padding_idx is not None:
        rows = rows.masked_fill((ids == padding_idx).unsqueeze(-1), 0)
    if total is None:
        total = empty_pooled(rows, *shape).zero_()
    else:
        total = total.contiguous()
    return add_rows(total, ids.flatten(), rows.flatten(0, -2))


def add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Adds rows[i] of [T, H] to total[ids[i]] of [V, H] in place, and rounds the sum of each id
    once.
    """
    if rows.dtype.itemsize >= 4:
        return total.index_add_(0, ids, rows)
    distinct, place = cast(tuple[Tensor, Tensor], cast(Any, ids).unique(return_inverse=True))
    sums = total[distinct].float().index_add_(0, place, rows.float())
    return total.index_copy_(0, distinct, sums.to(total.dtype))
