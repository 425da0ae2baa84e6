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

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import (
    bias_dropout_residual,
    combine_tokens,
    grouped_linear,
    grouped_product,
    permute_tokens,
    sort_by_expert,
)
from ..ops.dropout_mask import keys_from_row
from ..ops.experts import add_expert_bias, permute_rows
from .collectives import (
    copy_to_tp,
    exchange_rows,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_sequence,
    start_all_gather,
)
from .division import find_first_unit
from .dropout import Dropout
from .mesh import ParallelMesh, axis_ranks, axis_sizes
from .parameter import SplitLayer, split_parameter
from .shard import AxisSplit, Shard


@dataclass(frozen=True)
class TokenRoutes:
    """Which rows travel between the expert-parallel ranks.

    Attributes:
        sent, received: The number of rows for and from each rank.
        longest: The most rows that any rank sends to another.
        order: int64 [sum(received)], the places of the received rows, which are in the order of
            ranks, when they are sorted by expert.
        counts: int64 [Ep], the number of received rows of each expert of this rank.
    """

    sent: list[int]
    received: list[int]
    longest: int
    order: Tensor
    counts: Tensor


class ExpertLoadCounting:
    """Says whether mixtures count what their experts compute. Each process has one instance,
    `expert_load_counting`.

    Attributes:
        is_on: While a forward pass is counted; what a backward pass recomputes is not counted again.
        is_token: For each stack of the model that has a mask, [B, S], 0 for padding, which is not
            counted. See `ParallelExperts.stack`.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.is_token: Mapping[str, Tensor] = {}

    @contextmanager
    def over(self, is_token: Mapping[str, Tensor]) -> Generator[None]:
        """Counts within the context."""
        self.is_on = True
        self.is_token = is_token
        try:
            yield
        finally:
            self.is_on = False
            self.is_token = {}


expert_load_counting = ExpertLoadCounting()


class ParallelExperts(SplitLayer):
    """E MLPs, with or without a gate, each of which computes the tokens that a router sends to it.

    The matrices of all experts are stacked along the rows of one parameter, so that one grouped
    product multiplies them and a rank's part of it is contiguous.

    Args:
        hidden_size: H.
        inner_size: F, of one expert.
        count: E.
        activate: Maps the projections [n, Fp], or with a gate [n, 2Fp], to [n, Fp].
        gated: Whether an expert has a gate.
        interleaved: Whether each feature of the gate comes before the same one of up, instead of
            the whole gate before the whole up projection.
        bias: Whether its projections have biases.
        dropout: The rate at which inner features are dropped.
        output_dropout: The rate at which the experts' results are dropped.
        drops_tokens: Whether a token may have no expert: E instead of an expert's number.
        sequence_parallel: Input and output are this rank's part [B, S/tp, H] of the sequence.

    Attributes:
        gate_up: With gates, [Ep · 2Fp, H]: of each of this rank's experts its gate and then its up
            projection, or the rows of both in turn.
        up: Without gates, [Ep · Fp, H].
        down: [Ep · Fp, H]: of each expert the transposed down projection.
        gate_up_bias, up_bias, down_bias: [Ep · 2Fp], [Ep · Fp] and [Ep · Hp], or None. Each
            tensor-parallel rank adds its part of the last one to its part of the results.
        first, last: The experts of this rank, [first, last); they may be none.
        load: int64 [E + 1], how often each expert, of all ranks, was chosen for this rank's tokens
            while `expert_load_counting` was on, and the number of choices that were dropped; None if
            nobody counts. Tensor-parallel ranks count the same tokens.
        stack: The part of the model whose tokens these are: "encoder", "decoder", or "" where there
            is one stack.
        adapter: None, or a module whose `add(weight, product, x, counts)` returns what a product with
            the matrices "gate_up" or "down" becomes, such as LoRA's.
    """

    load: Tensor | None = None
    stack: str = ""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        count: int,
        activate: Callable[[Tensor], Tensor],
        *,
        gated: bool = True,
        interleaved: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        drops_tokens: bool = False,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.inner_size = inner_size
        self.count = count
        self.activate = activate
        self.gated = gated
        self.drops_tokens = drops_tokens
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
        # A gate and its up projection stay together when their rows are dealt over the ranks.
        widths = (2 * inner_size,) if interleaved else (inner_size, inner_size)
        unit = 2 if interleaved else 1
        if gated:
            self.shard = _stack_experts(count, widths, hidden_size, unit=unit)
            self.gate_up = split_parameter(self.shard, mesh)
        else:
            self.shard = _stack_experts(count, (inner_size,), hidden_size)
            self.up = split_parameter(self.shard, mesh)
        self.down = split_parameter(_stack_experts(count, (inner_size,), hidden_size), mesh)
        self.adapter: Any = None
        self.gate_up_bias: Tensor | None = None
        self.up_bias: Tensor | None = None
        self.down_bias: Tensor | None = None
        if bias and gated:
            self.gate_up_bias = split_parameter(_stack_experts(count, widths, unit=unit), mesh)
        elif bias:
            self.up_bias = split_parameter(_stack_experts(count, (inner_size,)), mesh)
        if bias:
            self.down_bias = split_parameter(_stack_experts(count, (hidden_size,)), mesh)
        self.dropout = Dropout(dropout, split_dim=-1, count=inner_size, mesh=mesh)
        self.output_dropout = Dropout(output_dropout, mesh=mesh)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Returns each token's weighted sum of its experts, in the shape of x.

        Args:
            x: [B, S, H], or [B, S/tp, H] under sequence parallelism.
            weights: [B, S, k], of the whole sequence and equal on every tensor-parallel rank; 0 for
                a dropped token.
            experts: int64 [B, S, k], the experts that the weights belong to.
        """
        if self.load is not None and expert_load_counting.is_on:
            self.count_choices(self.load, experts)
        if self.sequence_parallel:
            x = gather_sequence(x, self.mesh)
        else:
            x = copy_to_tp(x, self.mesh)
        # A rank computes a part of each expert, so its gradient of the weights is a part too.
        weights = copy_to_tp(weights, self.mesh)
        y = self.mix(x, weights, experts)
        if self.sequence_parallel:
            return reduce_scatter_sequence(y, self.mesh)
        return reduce_from_tp(y, self.mesh)

    def count_choices(self, load: Tensor, experts: Tensor) -> None:
        """Adds the choices of a forward pass, int64 [B, S, k], to `load`."""
        ones = torch.ones_like(experts)
        is_token = expert_load_counting.is_token.get(self.stack)
        # Where an encoder leaves padding out, no row is padding.
        if is_token is not None and is_token.shape == experts.shape[:2]:
            ones = ones * (is_token != 0)[..., None]
        load.scatter_add_(0, experts.flatten(), ones.flatten())

    def mix(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Returns this rank's part of the weighted sums, [B, S, H], of x [B, S, H] and [B, S, k]."""
        top_k = experts.shape[-1]
        order, counts = sort_by_expert(experts, self.count, drops=self.drops_tokens)
        rows = permute_tokens(x.flatten(0, -2), order, top_k)
        keys = self.find_keys(self.dropout, x, order, top_k)
        mesh = self.mesh
        if mesh is None or mesh.size("expert") == 1:
            rows = self.compute(rows, counts, keys)
        else:
            rows = self.compute_elsewhere(rows, counts, keys, mesh)
        output_keys = self.find_keys(self.output_dropout, x, order, top_k)
        if output_keys is not None:
            rows = bias_dropout_residual(
                rows, None, None, p=self.output_dropout.p, keys=output_keys
            )
        return combine_tokens(rows, weights.reshape(-1, top_k), order).view_as(x)

    def find_keys(self, dropout: Dropout, x: Tensor, order: Tensor, top_k: int) -> Tensor | None:
        """Returns the key of each sorted pair for one use of a dropout, int64 [B S k], or None if
        nothing is dropped.

        A pair's mask depends on its sample, position and choice alone.

        Args:
            x: [B, S, H].
            order: int64 [B S k].
        """
        if not dropout.drops:
            return None
        pairs = x.shape[1] * top_k  # of a sample
        return keys_from_row(dropout.keys(x)[order // pairs], order % pairs)

    def compute_elsewhere(
        self, rows: Tensor, counts: Tensor, keys: Tensor | None, mesh: ParallelMesh
    ) -> Tensor:
        """Returns what `compute` does, of experts that are dealt over the expert-parallel ranks.

        Args:
            counts: int64 [E], the number of this rank's rows of each expert.
        """
        group = mesh.group("expert")
        routes = self.find_routes(counts, mesh)
        total = len(rows)
        travelling = sum(routes.sent)
        if travelling < total:
            rows = rows[:travelling]
        rows = exchange_rows(rows, routes.sent, routes.received, group, routes.longest)
        if keys is not None:
            keys = exchange_rows(
                keys[:travelling], routes.sent, routes.received, group, routes.longest
            )
            keys = keys.index_select(0, routes.order)
        rows = self.compute(permute_rows(rows, routes.order), routes.counts, keys)
        rows = permute_rows(rows, routes.order.argsort())
        rows = exchange_rows(rows, routes.received, routes.sent, group, routes.longest)
        if travelling < total:
            rows = F.pad(rows, (0, 0, 0, total - travelling))
        return rows

    def compute(self, rows: Tensor, counts: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns this rank's part of the results of its experts, [M, H].

        Args:
            rows: [M, H], sorted by expert.
            counts: int64 [Ep], the number of rows of each expert.
            keys: int64 [M], of the dropout of inner features.
        """
        own = self.last - self.first
        first = self.gate_up if self.gated else self.up
        first = first.view(own, -1, self.hidden_size)  # [Ep, 2Fp or Fp, H]
        down = self.down.view(own, -1, self.hidden_size)  # [Ep, Fp, H]
        drops = self.drops_tokens
        inputs = rows
        rows = grouped_linear(rows, first, counts, drops=drops)
        if self.adapter is not None:
            rows = self.adapter.add("gate_up", rows, inputs, counts)
        first_bias = self.gate_up_bias if self.gated else self.up_bias
        if first_bias is not None:
            rows = add_expert_bias(rows, first_bias.view(own, -1), counts)
        rows = self.activate(rows)
        if keys is not None:
            dropout = self.dropout
            first_column = dropout.find_first(rows.shape[-1])
            rows = bias_dropout_residual(
                rows, None, None, p=dropout.p, keys=keys, first_column=first_column
            )
        inputs = rows
        rows = grouped_product(rows, down, counts, drops=drops)
        if self.adapter is not None:
            rows = self.adapter.add("down", rows, inputs, counts)
        if self.down_bias is None:
            return rows
        # The ranks' results are added up, so each rank adds the biases of its own columns alone.
        bias = self.down_bias.view(own, -1)  # [Ep, Hp]
        start = find_first_unit(
            self.hidden_size, axis_ranks(self.mesh)["tensor"], axis_sizes(self.mesh)["tensor"]
        )
        bias = F.pad(bias, (start, self.hidden_size - start - bias.shape[1]))
        return add_expert_bias(rows, bias, counts)

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
        bounds = [find_first_unit(self.count, rank, size) for rank in range(size + 1)]
        # The rows from each rank to each rank.
        pairs = [[sum(row[a:b]) for a, b in pairwise(bounds)] for row in table]
        own = mesh.rank_in("expert")
        sent = pairs[own]
        received = [row[own] for row in pairs]
        longest = max(count for a, row in enumerate(pairs) for b, count in enumerate(row) if a != b)
        experts = numbers.repeat_interleave(mine.flatten(), output_size=sum(received))
        return TokenRoutes(sent, received, longest, experts.argsort(stable=True), mine.sum(0))

    def extra_repr(self) -> str:
        dealt = ""
        if self.last - self.first < self.count:
            dealt = f"{self.first} to {self.last - 1} of "
        return (
            f"{dealt}{self.count} x {self.hidden_size}x{self.inner_size} split along the inner features "
            f"over tensor, sequence_parallel={self.sequence_parallel}"
        )


def _stack_experts(count: int, widths: tuple[int, ...], *columns: int, unit: int = 1) -> Shard:
    """Returns the split of stacked experts: the expert axis deals them, and the tensor axis splits
    each of an expert's matrices.

    Args:
        count: E.
        widths: The rows of each matrix of an expert.
        columns: The columns of the matrices; none for biases.
        unit: The number of neighboring rows that stay together.
    """
    rows = sum(widths)
    return Shard.from_splits(
        (count * rows, *columns),
        AxisSplit(0, axis="expert", unit=rows),
        AxisSplit(0, axis="tensor", groups=widths * count, unit=unit),
    )
