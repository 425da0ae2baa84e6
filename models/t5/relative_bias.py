"""T5's relative position bias (Raffel et al., 2020, section 2.1): a trained number for each head and bucket of
distances, added to the attention scores."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...mpu import ParallelMesh, Shard, tp_size
from ...mpu.parameter import split_parameter
from ..common.attention import check_heads

ROWS_AT_ONCE = 64  # whose gradients are summed up in one go


class RelativeBias(nn.Module):
    """The biases of one stack, which all its layers share; a rank has those of its heads. Weight [buckets, N].

    bidirectional: keys after the query have buckets of their own (half of all); otherwise they share bucket 0.
    """

    def __init__(
        self, buckets: int, num_heads: int, max_distance: int, *, bidirectional: bool, mesh: ParallelMesh | None = None
    ) -> None:
        super().__init__()
        check_heads(num_heads, tp_size(mesh))
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.shard = Shard((buckets, num_heads), 1)
        self.weight = split_parameter(self.shard, mesh)  # [buckets, Np]

    def forward(self, queries: int, keys: int) -> Tensor:
        """[1, Np, Sq, Sk]; the last query is at the last key's position."""
        # The bias depends on key - query alone: look each distance up once, then lay the diagonals out.
        distances = torch.arange(1 - keys, queries, device=self.weight.device)
        buckets = relative_buckets(distances, self.buckets, self.max_distance, self.bidirectional)
        # Many distances share a bucket, so their gradients are added up in fp32.
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        by_distance = F.embedding(buckets, wide).to(self.weight.dtype).t()  # [Np, Sq + Sk - 1]
        return _LayOutDiagonals.apply(by_distance, queries, keys)[None]

    def extra_repr(self) -> str:
        return f"{self.shard.describe()}, bidirectional={self.bidirectional}"


class _LayOutDiagonals(Function):
    """[N, Sq + Sk - 1], from distance 1 - Sk to Sq - 1 -> [N, Sq, Sk], in which (i, j) has distance
    j - i - (Sk - Sq).

    The gradient sums up the diagonals, in fp32 for 16 bits, a block of rows at a time: behind zeros, and read with
    rows one longer, every row is shifted back by one more.
    """

    @staticmethod
    def forward(ctx, values: Tensor, queries: int, keys: int) -> Tensor:
        ctx.shape = values.shape
        # Row i begins at Sq - 1 - i. Contiguous, or the softmax of each layer would copy it.
        return values.contiguous().unfold(1, keys, 1).flip(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        (grad,) = grads  # [N, Sq, Sk]
        queries, keys = grad.shape[1:]
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        for first in range(0, queries, ROWS_AT_ONCE):
            rows = grad[:, first : first + ROWS_AT_ONCE]
            size = rows.shape[1]
            width = keys + size - 1
            shifted = grad.new_zeros(len(grad), size * (width + 1))
            shifted[:, size - 1 :][:, : size * width].unflatten(1, (size, width))[..., :keys] = rows
            sums = shifted.unflatten(1, (size, width + 1)).sum(1, dtype=total.dtype)
            total[:, queries - first - size :][:, :width] += sums[:, :width]
        return total.to(grad.dtype), None, None


def relative_buckets(distances: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of each distance key - query: exact when short, then logarithmic, the last from `max_distance` on."""
    first = torch.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        first = (distances > 0).long() * buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = buckets // 2
    # Distances below `exact` take the other branch; the clamp keeps log finite there. The order of operations is
    # transformers', so that rounding puts the edges where its does.
    steps = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    logarithmic = (exact + steps.long()).clamp(max=buckets - 1)
    return first + torch.where(distances < exact, distances, logarithmic)
