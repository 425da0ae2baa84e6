"""Implements the experts of a mixture, which are dealt over the expert-parallel ranks, and whose
matrices are split over the tensor-parallel ranks.

Along the tensor axis every rank has all tokens of its batch, and of its experts an equal part of
the inner features, as `ColumnParallelLinear` and `RowParallelLinear` split those of a single MLP.
There no token travels, and the sum of the ranks' results is the only exchange, as in a dense model.

Along the expert axis every rank has other tokens and other experts. An all-to-all brings each token
to the ranks of its experts, and another one brings the results back. The ranks first tell one
another how many tokens come, and this is the only time that the host waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..ops import combine_tokens, grouped_linear, grouped_product, permute_tokens, sort_by_expert
from ..ops.experts import permute_rows
from .collectives import (
    copy_to_tp,
    exchange_rows,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_sequence,
    start_all_gather,
)
from .division import find_first_unit
from .mesh import ParallelMesh, axis_ranks, axis_sizes
from .parameter import SplitLayer, split_parameter
from .shard import AxisSplit, Shard


@dataclass(frozen=True)
class TokenRoutes:
    """Which rows travel between the expert-parallel ranks.

    Attributes:
        sent, received: The number of rows for and from each rank.
        order: int64 [sum(received)], the places of the received rows, which are in the order of
            ranks, when they are sorted by expert.
        counts: int64 [Ep], the number of received rows of each expert of this rank.
    """

    sent: list[int]
    received: list[int]
    order: Tensor
    counts: Tensor


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
        gate_up: [Ep · 2Fp, H]: of each of this rank's experts its gate and then its up projection.
        down: [Ep · Fp, H]: of each of them the transposed down projection.
        first, last: The experts of this rank, [first, last); they may be none.
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
        rank = axis_ranks(mesh)["expert"]
        size = axis_sizes(mesh)["expert"]
        if size > count:
            raise ValueError(
                f"{count} experts cannot be dealt over {size} expert-parallel ranks; use "
                f"expert_parallel_size 1 to {count}"
            )
        self.first = find_first_unit(count, rank, size)
        self.last = find_first_unit(count, rank + 1, size)
        self.shard = _stack_experts(count, (inner_size, inner_size), hidden_size)
        self.gate_up = split_parameter(self.shard, mesh)
        self.down = split_parameter(_stack_experts(count, (inner_size,), hidden_size), mesh)

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
        order, counts = sort_by_expert(experts, self.count)
        rows = permute_tokens(x, order, experts.shape[-1])
        mesh = self.mesh
        if mesh is None or mesh.size("expert") == 1:
            return combine_tokens(self.compute(rows, counts), weights, order)
        group = mesh.group("expert")
        routes = self.find_routes(counts, mesh)
        rows = exchange_rows(rows, routes.sent, routes.received, group)
        rows = self.compute(permute_rows(rows, routes.order), routes.counts)
        rows = permute_rows(rows, routes.order.argsort())
        rows = exchange_rows(rows, routes.received, routes.sent, group)
        return combine_tokens(rows, weights, order)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns this rank's part of the results of its experts, [M, H].

        Args:
            rows: [M, H], sorted by expert.
            counts: int64 [Ep], the number of rows of each expert.
        """
        own = self.last - self.first
        gate_up = self.gate_up.view(own, -1, self.hidden_size)  # [Ep, 2Fp, H]
        down = self.down.view(own, -1, self.hidden_size)  # [Ep, Fp, H]
        rows = self.activate(grouped_linear(rows, gate_up, counts))
        return grouped_product(rows, down, counts)

    @torch.no_grad()
    def find_routes(self, counts: Tensor, mesh: ParallelMesh) -> TokenRoutes:
        """Returns which rows travel between the expert-parallel ranks. Collective along this axis.

        Args:
            counts: int64 [E], the number of this rank's rows of each expert.
        """
        size = mesh.size("expert")
        by_rank = start_all_gather(counts, 0, mesh.group("expert"))().view(size, self.count)
        mine = by_rank[:, self.first : self.last]  # [ranks, Ep]
        numbers = torch.arange(mine.numel(), device=counts.device) % mine.shape[1]
        # The only wait of the host: it must know all numbers to receive.
        table = cast(list[list[int]], cast(Any, by_rank).tolist())
        sent: list[int] = []
        received: list[int] = []
        for rank in range(size):
            start = find_first_unit(self.count, rank, size)
            stop = find_first_unit(self.count, rank + 1, size)
            sent.append(sum(table[mesh.rank_in("expert")][start:stop]))
            received.append(sum(table[rank][self.first : self.last]))
        experts = numbers.repeat_interleave(mine.flatten(), output_size=sum(received))
        return TokenRoutes(sent, received, experts.argsort(stable=True), mine.sum(0))

    def extra_repr(self) -> str:
        dealt = ""
        if self.last - self.first < self.count:
            dealt = f"{self.first} to {self.last - 1} of "
        return (
            f"{dealt}{self.count} x {self.hidden_size}x{self.inner_size} split along the inner features "
            f"over tensor, sequence_parallel={self.sequence_parallel}"
        )


def _stack_experts(count: int, widths: tuple[int, ...], hidden_size: int) -> Shard:
    """Returns the split of stacked experts: the expert axis deals them, and the tensor axis splits
    each of an expert's matrices.

    Args:
        count: E.
        widths: The rows of each matrix of an expert.
    """
    rows = sum(widths)
    return Shard.from_splits(
        (count * rows, hidden_size),
        AxisSplit(0, axis="expert", unit=rows),
        AxisSplit(0, axis="tensor", groups=widths * count),
    )
