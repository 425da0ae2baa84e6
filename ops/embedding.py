"""Embedding look-up that shares the gradient of its table with the other uses of the table."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class _Embedding(Function):
    """ids, table [V, H], index of a row without gradient or None -> rows, and the table for those who use it next."""

    @staticmethod
    def forward(ctx, ids: Tensor, table: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_idx = table.shape, padding_idx
        ctx.set_materialize_grads(False)
        return F.embedding(ids, table), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        (rows, total), (ids,) = grads, ctx.saved_tensors
        if rows is None:
            return None, total, None
        if not rows.is_cpu:  # the sum of an accelerator's own kernel does not depend on an order
            padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
            own = torch.ops.aten.embedding_dense_backward(rows, ids, ctx.shape[0], padding_idx, False)
            return None, own if total is None else total.add_(own), None
        if ctx.padding_idx is not None:
            rows = rows.masked_fill((ids == ctx.padding_idx).unsqueeze(-1), 0)
        total = rows.new_zeros(ctx.shape) if total is None else total.contiguous()
        return None, add_rows(total, ids.flatten(), rows.flatten(0, -2)), None


def add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """total[ids[i]] += rows[i], in place; the sum for an id is rounded once. total: [V, H]; rows: [T, H]"""
    if rows.dtype.itemsize >= 4:
        return total.index_add_(0, ids, rows)
    distinct, place = ids.unique(return_inverse=True)
    sums = total[distinct].float().index_add_(0, place, rows.float())
    return total.index_copy_(0, distinct, sums.to(total.dtype))


def embedding(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
    """(`F.embedding(ids, table, padding_idx)`, the table for whatever uses it next in the same forward pass).

    ids: integers [...]; table: [V, H]. The gradient of those next uses arrives here, and that of the rows is added to
    it in place: however many look-ups and products share a table, its gradient, often the largest tensor of a step, is
    made once. So the returned table is for layers that make a gradient of their own for it, as products do.
    """
    if torch.compiler.is_compiling():  # a compiler cannot trace a gradient that is written over
        return F.embedding(ids, table, padding_idx), table
    return _Embedding.apply(ids, table, padding_idx)
