"""The token embedding and the output head, split along the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import embedding
from .collectives import reduce_from_tp, reduce_scatter_sequence
from .linear import column_parallel
from .mesh import ParallelMesh, tp_rank, tp_size
from .parameter import SplitLayer, split_parameter
from .shard import Shard


def check_ids(ids: Tensor, count: int, what: str) -> None:
    """Raise `ValueError` if an id is outside [0, count). On an accelerator, where looking would stall the host, the
    check runs on the device and fails the way an out-of-range index there does."""
    inside = (ids >= 0) & (ids < count)
    if not ids.is_cpu:
        torch.ops.aten._assert_async(inside.all())
    elif not inside.all():
        raise ValueError(f"{what} {ids[~inside][0]} is outside 0..{count - 1}")


class VocabParallelEmbedding(SplitLayer):
    """Rows of the table are split over the tensor-parallel ranks, padded to an equal number of rows per rank.

    padding_idx: the row of this id gets no gradient.
    pad_multiple: each rank's number of rows is rounded up to a multiple of it.
    sequence_parallel: return this rank's part of the sequence.

    Input: integer ids [B, S]. Output [B, S, H], or [B, S/tp, H]. Raises `ValueError` for an id outside the true
    vocabulary, also where the table has padding rows.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        pad_multiple: int = 1,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel, self.mesh = sequence_parallel, mesh
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx {padding_idx} is outside a vocabulary of {num_embeddings}")
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.shard = Shard((num_embeddings, embedding_dim), 0, pad_multiple=pad_multiple)
        self.weight = split_parameter(self.shard, mesh)  # [Vp, H]

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)[0]

    def embed(self, ids: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The output, and the table [Vp, H] to hand to the next look-up of the same forward pass or to a tied head.

        That is the weight; handing it on saves the next one a gradient of its own that is as large.
        """
        check_ids(ids, self.num_embeddings, "token id")
        table = self.weight if table is None else table
        if tp_size(self.mesh) == 1:
            return embedding(ids, table, self.padding_idx)
        [(start, stop)] = self.shard.ranges(tp_rank(self.mesh), tp_size(self.mesh))
        elsewhere = (ids < start) | (ids >= stop)  # [B, S]
        padding_idx = self.padding_idx
        padding_idx = padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None
        rows, table = embedding((ids - start).masked_fill(elsewhere, 0), table, padding_idx)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)  # [B, S, H]
        if self.sequence_parallel:
            return reduce_scatter_sequence(rows, self.mesh), table
        return reduce_from_tp(rows, self.mesh), table


class VocabParallelHead(SplitLayer):
    """Hidden states -> logits of this rank's slice of the vocabulary; nothing is gathered.

    tied: the embedding whose weight is shared (the very same parameter).
    sequence_parallel: the input is this rank's part of the sequence; logits are for the whole sequence.

    Input [B, S, H] or [B, S/tp, H]. Output [B, S, Vp]; rank r's column c is the token r * Vp + c, and columns past
    the vocabulary are padding: pass `num_classes=` to `vocab_parallel_cross_entropy`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_embeddings: int,
        *,
        bias: bool = False,
        tied: VocabParallelEmbedding | None = None,
        pad_multiple: int = 1,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        self.hidden_size, self.num_embeddings = hidden_size, num_embeddings
        self.sequence_parallel, self.mesh = sequence_parallel, mesh
        if tied is not None:
            if (tied.num_embeddings, tied.embedding_dim) != (num_embeddings, hidden_size):
                raise ValueError(
                    f"a head of {num_embeddings} x {hidden_size} cannot be tied to an embedding of "
                    f"{tied.num_embeddings} x {tied.embedding_dim}"
                )
            pad_multiple = tied.shard.pad_multiple
        self.shard = Shard((num_embeddings, hidden_size), 0, pad_multiple=pad_multiple)
        self.tied = tied is not None
        self.weight = tied.weight if tied is not None else split_parameter(self.shard, mesh)  # [Vp, H]
        bias_shard = Shard((num_embeddings,), 0, pad_multiple=pad_multiple)
        self.bias = split_parameter(bias_shard, mesh) if bias else None  # [Vp]

    def forward(self, hidden: Tensor, table: Tensor | None = None) -> Tensor:
        """table: what the tied embedding's `embed` returned; an untied head has no use for it."""
        weight = self.shared_weight(table)
        return column_parallel(hidden, weight, self.bias, sequence_parallel=self.sequence_parallel, mesh=self.mesh)

    def shared_weight(self, table: Tensor | None) -> Tensor:
        return table if self.tied and table is not None else self.weight
