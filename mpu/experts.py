"""Implements the experts of a mixture, whose matrices are split over the tensor-parallel ranks.

Every rank has all tokens of its batch, and of every expert an equal part of the inner features, as
`ColumnParallelLinear` and `RowParallelLinear` split those of a single MLP. Therefore no token
travels, and the sum of the ranks' results is the only exchange, as in a dense model.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..ops import combine_tokens, grouped_linear, grouped_product, permute_tokens, sort_by_expert
from .collectives import copy_to_tp, gather_sequence, reduce_from_tp, reduce_scatter_sequence
from .mesh import ParallelMesh
from .parameter import SplitLayer, split_parameter
from .shard import Shard


class ParallelExperts(SplitLayer):
    """E gated MLPs without biases, each of which computes the tokens that a router sends to it.

    The matrices of all experts are stacked along the rows of one parameter, so that one grouped
    product multiplies them and a rank's part of it is contiguous.

    Args:
        hidden_size: H.
        inner_size: F, of one expert.
        count: E.
        activate: Maps the projections [n, 2Fp], gate before up, to [n, Fp].
        sequence_parallel: Input and output are this rank's part [B, S/tp, H] of the sequence.

    Attributes:
        gate_up: [E · 2Fp, H]: of each expert its gate and then its up projection.
        down: [E · Fp, H]: of each expert the transposed down projection.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        count: int,
        activate: Callable[[Tensor], Tensor],
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.inner_size = inner_size
        self.count = count
        self.activate = activate
        self.sequence_parallel = sequence_parallel
        self.mesh = mesh
        self.shard = Shard((count * 2 * inner_size, hidden_size), 0, (inner_size,) * (2 * count))
        self.gate_up = split_parameter(self.shard, mesh)
        down_shard = Shard((count * inner_size, hidden_size), 0, (inner_size,) * count)
        self.down = split_parameter(down_shard, mesh)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Returns each token's weighted sum of its experts, in the shape of x.

        Args:
            x: [B, S, H], or [B, S/tp, H] under sequence parallelism.
            weights: [B, S, k], of the whole sequence and equal on every tensor-parallel rank.
            experts: int64 [B, S, k], the experts that the weights belong to.
        """
        if self.sequence_parallel:
            x = gather_sequence(x, self.mesh)
        else:
            x = copy_to_tp(x, self.mesh)
        # A rank computes a part of each expert, so its gradient of the weights is a part too.
        weights = copy_to_tp(weights, self.mesh)
        top_k = weights.shape[-1]
        y = self.mix(x.flatten(0, -2), weights.reshape(-1, top_k), experts.reshape(-1, top_k))
        y = y.view_as(x)
        if self.sequence_parallel:
            return reduce_scatter_sequence(y, self.mesh)
        return reduce_from_tp(y, self.mesh)

    def mix(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Returns this rank's part of the weighted sums, [T, H], of x [T, H] and [T, k]."""
        gate_up = self.gate_up.view(self.count, -1, self.hidden_size)  # [E, 2Fp, H]
        down = self.down.view(self.count, -1, self.hidden_size)  # [E, Fp, H]
        order, counts = sort_by_expert(experts, self.count)
        rows = permute_tokens(x, order, experts.shape[-1])
        rows = self.activate(grouped_linear(rows, gate_up, counts))
        rows = grouped_product(rows, down, counts)
        return combine_tokens(rows, weights, order)

    def extra_repr(self) -> str:
        return (
            f"{self.count} x {self.hidden_size}x{self.inner_size} split along the inner features "
            f"over tensor, sequence_parallel={self.sequence_parallel}"
        )
