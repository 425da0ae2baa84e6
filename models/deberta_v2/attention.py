"""Disentangled attention (He et al., 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled
Attention", arXiv:2006.03654, section 3.1).

A score is the sum of up to three terms over sqrt(D · terms): of the query and the key, of the query
and the embedding of the key's relative position (c2p), and of the key and that of the query's (p2c).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...mpu import ColumnParallelLinear, ParallelMesh, scatter_sequence, tp_size
from ..blocks.attention import SelfAttention, merge_heads, split_fused_heads
from ..parallel_config import ParallelConfig
from .config import DebertaV2Config


class RelativePositions(NamedTuple):
    """What the blocks share of the relative positions of a call.

    Attributes:
        embeddings: [1, R, H], of R relative positions, the same on each rank.
        of_keys: int64 [S, S], for each query and key the number of the key's relative position.
        of_queries: int64 [S, S], for each key and query the number of the query's.
    """

    embeddings: Tensor
    of_keys: Tensor
    of_queries: Tensor


def find_relative_positions(
    embeddings: Tensor, length: int, config: DebertaV2Config
) -> RelativePositions:
    """Returns the relative positions of sequences of a length.

    Args:
        embeddings: [1, R, H].
    """
    places = torch.arange(length, device=embeddings.device)
    distance = places[:, None] - places[None, :]
    if config.position_buckets > 0:
        distance = round_distances(distance, config.position_buckets, config.relative_positions)
    span = config.position_span
    return RelativePositions(
        embeddings,
        (distance + span).clamp(0, 2 * span - 1),
        (span - distance).clamp(0, 2 * span - 1),
    )


def round_distances(distance: Tensor, buckets: int, most: int) -> Tensor:
    """Returns distances, int64, whose absolute value beyond half of `buckets` is rounded up on a
    logarithmic scale, on which `most` - 1 is the last bucket.
    """
    middle = buckets // 2
    is_near = (distance < middle) & (distance > -middle)
    size = torch.where(is_near, middle - 1, distance.abs())
    # `torch.tensor` would send the number to a GPU, for which the host would wait in each call.
    widest = torch.log(torch.full((), (most - 1) / middle, device=distance.device))
    rounded = torch.ceil(torch.log(size / middle) / widest * (middle - 1)) + middle
    return torch.where(size <= middle, distance, rounded * distance.sign()).long()


class DisentangledAttention(SelfAttention):
    """Attention whose scores have terms of relative positions."""

    def __init__(
        self, config: DebertaV2Config, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        size = config.hidden_size
        head_size = size // config.num_attention_heads
        terms = config.position_terms
        shared: dict[str, Any] = {"mesh": mesh, "parallel_config": parallel_config}
        super().__init__(
            size,
            config.num_attention_heads,
            scale=(head_size * (1 + len(terms))) ** -0.5,
            dropout=config.attention_probs_dropout_prob,
            **shared,
        )
        self.mesh = mesh
        self.sequence_parallel = parallel_config.sequence_parallel
        self.terms = terms
        self.shares_projections = config.share_att_key
        if config.relative_attention and not config.share_att_key:
            for term in terms:
                name = "position_key" if term == "c2p" else "position_query"
                projection = ColumnParallelLinear(
                    size,
                    size,
                    unit=head_size,
                    sequence_parallel=parallel_config.sequence_parallel,
                    mesh=mesh,
                )
                self.add_module(name, projection)

    def forward(  # type: ignore[override] - it has no cache and no rotation
        self, x: Tensor, mask: Tensor | None, relative: RelativePositions | None
    ) -> Tensor:
        """Returns [B, S, H], from [B, S, H] or [B, S/tp, H] under sequence parallelism."""
        q, k, v = split_fused_heads(self.qkv(x), self.heads["qkv"], self.head_size)
        bias = None
        if relative is not None and self.terms:
            bias = self.find_bias(q, k, relative)
        return self.output(merge_heads(self.core(q, k, v, mask, bias, False)))

    def find_bias(self, q: Tensor, k: Tensor, relative: RelativePositions) -> Tensor:
        """Returns the scaled terms of positions [B, Np, S, S] of q and k [B, Np, S, D]."""
        bias: Tensor | None = None
        keys, queries = self.project_positions(relative.embeddings)
        shape = (*q.shape[:3], q.shape[2])
        if keys is not None:
            products = torch.matmul(q, keys.mT)  # [B, Np, S, R]
            bias = products.gather(3, relative.of_keys.expand(shape))
        if queries is not None:
            products = torch.matmul(k, queries.mT)
            of_keys = products.gather(3, relative.of_queries.expand(shape)).mT
            bias = of_keys if bias is None else bias + of_keys
        assert bias is not None
        return bias * self.core.scale

    def project_positions(self, embeddings: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the keys and the queries [1, Np, R, D] of relative positions, each None if no term
        has them.
        """
        keys: Tensor | None = None
        queries: Tensor | None = None
        if self.shares_projections:
            fused = self.apply_to_positions(self.qkv, embeddings)
            queries, keys, _ = split_fused_heads(fused, self.heads["qkv"], self.head_size)
            keys = keys if "c2p" in self.terms else None
            queries = queries if "p2c" in self.terms else None
            return keys, queries
        if "c2p" in self.terms:
            keys = self.split_heads(self.apply_to_positions(self.position_key, embeddings))
        if "p2c" in self.terms:
            queries = self.split_heads(self.apply_to_positions(self.position_query, embeddings))
        return keys, queries

    def apply_to_positions(self, projection: Any, embeddings: Tensor) -> Tensor:
        """Returns the projection of [1, R, H], for this rank's heads. Under sequence parallelism,
        whose projections gather their input, each rank gives a part of the positions.
        """
        if not self.sequence_parallel:
            return projection(embeddings)
        count = embeddings.shape[1]
        missing = -count % tp_size(self.mesh)
        part = scatter_sequence(F.pad(embeddings, (0, 0, 0, missing)), self.mesh)
        return projection(part)[:, :count]

    def split_heads(self, x: Tensor) -> Tensor:
        """[1, R, Hp] -> [1, Np, R, D]"""
        return torch.unflatten(x, -1, (-1, self.head_size)).transpose(1, 2)
