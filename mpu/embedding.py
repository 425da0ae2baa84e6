"""Implements the embedding whose vocabulary is split over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..ops.autograd import Function, once_differentiable
from ..ops.device import can_overwrite_gradients
from ..ops.embedding import add_embedding_gradient
from .collectives import reduce_from_tp, reduce_scatter_sequence
from .context import cut_sequence
from .mesh import ParallelMesh
from .parameter import SplitLayer, split_parameter
from .shard import Shard
from .token_ids import check_ids


class VocabParallelEmbedding(SplitLayer):
    """An embedding whose table is split by rows over the tensor-parallel ranks.

    The table is padded, so that all ranks hold equally many rows. Input: integer ids [B, S]. Output
    [B, S, H], or [B, S/tp, H] under sequence parallelism. Of sequences that are split over the context
    axis, S are this rank's positions in the output.

    Args:
        padding_idx: The row of this id gets no gradient.
        pad_multiple: Each rank's number of rows is rounded up to a multiple of this number.
        sequence_parallel: Return this rank's part of the sequence.

    Raises:
        ValueError: An id is outside [0, num_embeddings), even if the table has a padding row for
            it.
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
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.sequence_parallel = sequence_parallel
        self.mesh = mesh
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx {padding_idx} is outside a vocabulary of {num_embeddings}"
            )
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.shard = Shard((num_embeddings, embedding_dim), 0, pad_multiple=pad_multiple)
        self.weight = split_parameter(self.shard, mesh)  # [Vp, H]

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)[0]

    def embed(self, ids: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the output, and the table [Vp, H] for its next use in the same forward pass.

        The next use is another call or a tied head. The returned table has the values of the
        weight. If each use takes the `table` that the previous one returned, all uses share one
        gradient, which is as large as the table.
        """
        check_ids(ids, self.num_embeddings, "token id")
        ids = cut_sequence(ids, self.mesh)
        table = self.weight if table is None else table
        if self.mesh is None or self.mesh.tp_size == 1:
            return embedding(ids, table, self.padding_idx)
        [(start, stop)] = self.shard.ranges(self.mesh.tp_rank, self.mesh.tp_size)
        elsewhere = (ids < start) | (ids >= stop)  # [B, S]
        padding_idx = None
        if self.padding_idx is not None and start <= self.padding_idx < stop:
            padding_idx = self.padding_idx - start
        rows, table = embedding((ids - start).masked_fill(elsewhere, 0), table, padding_idx)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)  # [B, S, H]
        if self.sequence_parallel:
            return reduce_scatter_sequence(rows, self.mesh), table
        return reduce_from_tp(rows, self.mesh), table


def embedding(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns `F.embedding(ids, table, padding_idx)`, and the table for its next use.

    The gradient of the next use in the same forward pass arrives here, and the gradient of the rows
    is added to it in place. So the table's gradient, often the largest tensor of a step, is
    allocated once for all look-ups and products that share the table. The next use must therefore
    allocate its own gradient for the table, as matrix products do.

    Args:
        ids: Integers [...].
        table: [V, H].
        padding_idx: A row that gets no gradient.
    """
    if not can_overwrite_gradients():
        return F.embedding(ids, table, padding_idx), table
    return _Embedding.apply(ids, table, padding_idx)


class _Embedding(Function):
    """Implements `embedding`: returns the rows, and the table for its next use."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, table: Tensor, padding_idx: int | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        ctx.padding_idx = padding_idx
        ctx.set_materialize_grads(False)
        return F.embedding(ids, table), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None):
        rows, total = grads
        (ids,) = ctx.saved_tensors
        if rows is None:
            return None, total, None
        table_grad = add_embedding_gradient(total, rows, ids, ctx.shape, ctx.padding_idx)
        return None, table_grad, None
