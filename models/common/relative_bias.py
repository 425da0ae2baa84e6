"""Relative position bias (Raffel et al., 2020, arXiv:1910.10683): a learned number per head and bucket of distances."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import ParallelMesh, Shard, tp_size
from ...mpu.parameter import split_parameter
from ...ops.autograd import Function, once_differentiable
from .transformer import check_heads

ROWS_AT_ONCE = 64  # rows of a relative bias whose gradients are summed in one operation


class RelativeBias(nn.Module):
    """A relative bias on attention scores, of one layer or shared by a stack. Weight [buckets, N], split by heads.

    Args:
        bidirectional: Keys after the query have separate buckets (half of all buckets); otherwise they share bucket 0.
    """

    def __init__(
        self, buckets: int, num_heads: int, max_distance: int, *, bidirectional: bool, mesh: ParallelMesh | None = None
    ) -> None:
        super().__init__()
        check_heads(num_heads, tp_size(mesh))
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.shard = Shard((buckets, num_heads), 1)
        self.weight = split_parameter(self.shard, mesh)  # [buckets, Np]

    def forward(self, queries: int, keys: int, buckets: Tensor | None = None) -> Tensor:
        """Returns the bias [1, Np, Sq, Sk]. The last query is at the last key's position.

        `buckets` is the result of `distance_buckets`, which is the same for all layers of a stack.
        """
        if buckets is None:
            buckets = distance_buckets(
                queries, keys, self.weight.device, self.buckets, self.max_distance, self.bidirectional
            )
        # Many distances share a bucket, so their gradients are summed in fp32.
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        by_distance = F.embedding(buckets, wide).to(self.weight.dtype).t()  # [Np, Sq + Sk - 1]
        return _LayOutDiagonals.apply(by_distance, queries, keys)[None]

    def extra_repr(self) -> str:
        return f"{self.shard.describe()}, bidirectional={self.bidirectional}"


class _LayOutDiagonals(Function):
    """Copies one value per distance, [N, Sq + Sk - 1], along the diagonals of [N, Sq, Sk].

    The distances go from 1 - Sk to Sq - 1; element (i, j) has distance j - i - (Sk - Sq). The gradient sums the
    diagonals, in fp32 for 16-bit types, for a block of rows at a time. To align the diagonals as columns, it pads the
    rows with zeros and views them with rows that are one element longer, which shifts each row by one more.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, queries: int, keys: int) -> Tensor:
        ctx.shape = values.shape
        # Row i begins at Sq - 1 - i. The result is contiguous; otherwise the softmax of each layer would copy it.
        return values.contiguous().unfold(1, keys, 1).flip(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads  # [N, Sq, Sk]
        queries, keys = grad.shape[1:]
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        for first in range(0, queries, ROWS_AT_ONCE):
            rows = grad[:, first : first + ROWS_AT_ONCE]
            size = rows.shape[1]
            width = keys + size - 1
            shifted = grad.new_zeros(len(grad), size * (width + 1))
            shifted[:, size - 1 :][:, : size * width].unflatten(1, (size, width))[..., :keys] = rows
            sums = torch.sum(shifted.view(-1, size, width + 1), 1, dtype=total.dtype)
            total[:, queries - first - size :][:, :width] += sums[:, :width]
        return total.to(grad.dtype), None, None


def distance_buckets(
    queries: int, keys: int, device: torch.device, buckets: int, max_distance: int, bidirectional: bool
) -> Tensor:
    """Returns the bucket of each distance key - query from 1 - Sk to Sq - 1, int64 [Sq + Sk - 1].

    The bias depends only on the distance, so `RelativeBias` looks each up once and copies it along its diagonal.
    """
    return relative_buckets(torch.arange(1 - keys, queries, device=device), buckets, max_distance, bidirectional)


def relative_buckets(distances: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Returns the bucket of each distance key - query.

    Short distances have one bucket each, longer ones share buckets of logarithmic width, and all distances from
    `max_distance` share the last bucket.
    """
    first = torch.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        first = (distances > 0).long() * buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = buckets // 2
    # Distances below `exact` do not use this value; the clamp keeps their log finite. The order of operations is that
    # of transformers, so that rounding gives the same bucket edges.
    steps = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    logarithmic = (exact + steps.long()).clamp(max=buckets - 1)
    return first + torch.where(distances < exact, distances, logarithmic)
