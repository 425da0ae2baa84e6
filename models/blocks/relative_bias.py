"""Relative position biases on attention scores, whose heads are split over the tensor-parallel
ranks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import ParallelMesh, Shard, context_size, tp_size
from ...mpu.parameter import split_parameter
from ...ops.attention import suits_tiles
from ...ops.softmax import lay_out_diagonals
from .attention import check_heads


class RelativeBias(nn.Module):
    """A relative position bias on attention scores, of one layer or shared by a stack (Raffel et
    al., 2020, arXiv:1910.10683). Weight [buckets, N], split by heads: a learned number for each
    head and bucket of distances.

    Args:
        bidirectional: Keys after the query have separate buckets (half of all buckets); otherwise
            they share bucket 0.
    """

    def __init__(
        self,
        buckets: int,
        num_heads: int,
        max_distance: int,
        *,
        bidirectional: bool,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__()
        check_heads(num_heads, tp_size(mesh))
        self.buckets = buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.mesh = mesh
        self.shard = Shard((buckets, num_heads), 1)
        self.weight = split_parameter(self.shard, mesh)  # [buckets, Np]

    def forward(self, queries: int, keys: int, buckets: Tensor | None = None) -> Tensor:
        """Returns the bias [1, Np, Sq, Sk], or of each distance, [Np, Sq + Sk - 1], where attention
        takes it so (see `suits_tiles`), and always under context parallelism. The last query is at the
        last key's position.

        `buckets` is the result of `distance_buckets`, which is the same for all layers of a stack.
        """
        if buckets is None:
            buckets = distance_buckets(
                queries,
                keys,
                self.weight.device,
                self.buckets,
                self.max_distance,
                self.bidirectional,
            )
        by_distance = self.look_up(buckets)  # [Np, Sq + Sk - 1]
        if context_size(self.mesh) > 1:
            return by_distance  # of which each rank needs a part
        if suits_tiles(queries, keys, self.weight.device.type, self.weight.itemsize):
            return by_distance
        return lay_out_diagonals(by_distance, queries, keys)[None]

    def look_up(self, buckets: Tensor) -> Tensor:
        """Returns the bias of each of D distances, [Np, D], from their buckets, int64 [D]."""
        # Many distances share a bucket, so their gradients are summed in fp32.
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return F.embedding(buckets, wide).to(self.weight.dtype).t()

    def extra_repr(self) -> str:
        return f"{self.shard.describe()}, bidirectional={self.bidirectional}"


def distance_buckets(
    queries: int,
    keys: int,
    device: torch.device,
    buckets: int,
    max_distance: int,
    bidirectional: bool,
) -> Tensor:
    """Returns the bucket of each distance key - query from 1 - Sk to Sq - 1, int64 [Sq + Sk - 1].

    The bias depends only on the distance, so `RelativeBias` looks each up once and copies it along
    its diagonal.
    """
    return relative_buckets(
        torch.arange(1 - keys, queries, device=device), buckets, max_distance, bidirectional
    )


def relative_buckets(
    distances: Tensor, buckets: int, max_distance: int, bidirectional: bool
) -> Tensor:
    """Returns the bucket of each distance key - query.

    Short distances have one bucket each, longer ones share buckets of logarithmic width, and all
    distances from `max_distance` share the last bucket.
    """
    first = torch.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        first = (distances > 0).long() * buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = buckets // 2
    # Distances below `exact` do not use this value; the clamp keeps their log finite. The order of
    # operations is that of transformers, so that rounding gives the same bucket edges.
    steps = (
        torch.log(distances.clamp(min=1).float() / exact)
        / math.log(max_distance / exact)
        * (buckets - exact)
    )
    logarithmic = (exact + steps.long()).clamp(max=buckets - 1)
    return first + torch.where(distances < exact, distances, logarithmic)
