"""T5's relative position bias (Raffel et al., 2020, section 2.1): a trained number for each head and bucket of
distances, added to the attention scores."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import ParallelMesh, Shard, tp_size
from ...mpu.parameter import split_parameter
from ..common.attention import check_heads


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
        return lay_out_diagonals(by_distance, queries, keys)[None]

    def extra_repr(self) -> str:
        return f"{self.shard.describe()}, bidirectional={self.bidirectional}"


def lay_out_diagonals(values: Tensor, queries: int, keys: int) -> Tensor:
    """[N, Sq + Sk - 1], from distance 1 - Sk to Sq - 1 -> [N, Sq, Sk], in which (i, j) has distance
    j - i - (Sk - Sq).

    Repeating the row with one element more than a row of the result is long shifts each row by one. Unlike
    `unfold`, this adds 16-bit gradients up in fp32.
    """
    width = values.shape[1]
    repeated = F.pad(values, (0, 1))[:, None].expand(-1, queries, -1).flatten(1)  # [N, Sq * (width + 1)]
    skewed = repeated[:, queries - 1 : queries - 1 + queries * width].unflatten(1, (queries, width))
    return skewed[..., :keys]


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
