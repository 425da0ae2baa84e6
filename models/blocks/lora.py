"""Implements LoRA (Hu et al., 2021, arXiv:2106.09685) for linear layers that are split over the
tensor-parallel ranks.

An adapter adds x·Aᵀ·Bᵀ·scaling to the output of a layer whose own weight is frozen. The factors are
split like the
layer: of a column-parallel layer A is replicated and B is split, of a row-parallel layer A is split
and B is replicated. The ranks exchange only x·Aᵀ, which is as wide as the ranks of the factors.
Replicated factors get the same gradient on every rank.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...mpu import (
    ColumnParallelLinear,
    Dropout,
    ParallelMesh,
    RowParallelLinear,
    Shard,
    copy_to_tp,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_sequence,
    tp_rank,
    tp_size,
)
from ...mpu.parameter import split_parameter
from ...ops import linear
from .mlp import GateUpLinear

Split = Literal["column", "row", "none"]
LINEARS = (ColumnParallelLinear, RowParallelLinear, GateUpLinear, nn.Linear)


def split_of(layer: nn.Module) -> Split:
    """Returns which features of a linear layer are split: its outputs, its inputs, or none."""
    if isinstance(layer, RowParallelLinear):
        return "row"
    return "column" if isinstance(layer, (ColumnParallelLinear, GateUpLinear)) else "none"


@dataclass(frozen=True)
class AdaptedRows:
    """The rows [first, stop) of a layer's weight that one pair of factors adapts, e.g. q of a fused
    QKV projection.

    Attributes:
        shape: The weight's full shape [out, in].
        shard: The weight's split; None if it is replicated.
        first, stop: Whole blocks of the weight.
    """

    shape: tuple[int, int]
    shard: Shard | None
    first: int
    stop: int

    def first_factor(self, r: int) -> nn.Parameter | Shard:
        """Returns the split of A [r, in], or its replicated parameter."""
        if self.shard is None or self.shard.dim == 0:
            return _replicated(r, self.shape[1])
        return Shard(
            (r, self.shape[1]), 1, unit=self.shard.unit, pad_multiple=self.shard.pad_multiple
        )

    def second_factor(self, r: int) -> nn.Parameter | Shard:
        """Returns the split of B [stop - first, r], or its replicated parameter.

        Of key-value heads that ranks share (see `AxisSplit`) B is replicated; it is small there.
        """
        count = self.stop - self.first
        if self.shard is None or self.shard.dim == 1 or self._has_shared_heads:
            return _replicated(count, r)
        groups = self.shard.groups if count == self.shape[0] else ()
        return Shard((count, r), 0, groups, self.shard.unit, self.shard.pad_multiple)

    @property
    def _has_shared_heads(self) -> bool:
        assert self.shard is not None
        return any(number in self.shard.shared_kv_groups for number, _ in self._blocks())

    def _blocks(self) -> list[tuple[int, int]]:
        """Returns (number of a block of the weight, its width) for the blocks that are adapted."""
        groups = (
            self.shard.groups if self.shard is not None and self.shard.groups else (self.shape[0],)
        )
        starts = [sum(groups[:number]) for number in range(len(groups))]
        return [
            (number, width)
            for number, (start, width) in enumerate(zip(starts, groups, strict=True))
            if self.first <= start < self.stop
        ]

    def local(self, rank: int, size: int, *, needed: bool) -> tuple[int, list[tuple[int, int]]]:
        """Returns where a rank's adapted rows begin among all its rows, and their ranges, counted
        from `first`.

        `needed` are the rows that the rank computes with, else those that it holds. Padding is left
        out.
        """
        if self.shard is None or self.shard.dim == 1:
            return self.first, [(0, self.stop - self.first)]
        ranges = (self.shard.compute_ranges if needed else self.shard.ranges)(rank, size)
        numbers = [number for number, _ in self._blocks()]
        own = [
            (ranges[number][0] - self.first, ranges[number][1] - self.first) for number in numbers
        ]
        return sum(stop - start for start, stop in ranges[: numbers[0]]), own


def _replicated(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, float("nan")))


def _parameter(split: nn.Parameter | Shard, mesh: ParallelMesh | None) -> nn.Parameter:
    return split_parameter(split, mesh) if isinstance(split, Shard) else split


class _InputDropout(Dropout):
    """Dropout of a layer's input, whose features may be split as a `Shard` says."""

    def __init__(
        self, p: float, shard: Shard | None, split_dim: int | None, mesh: ParallelMesh | None
    ) -> None:
        super().__init__(p, split_dim=split_dim, mesh=mesh)
        self._features = shard if split_dim == -1 else None

    def find_first(self, local: int) -> int:
        if self._features is None or tp_size(self.mesh) == 1:
            return super().find_first(local)
        return self._features.ranges(tp_rank(self.mesh), tp_size(self.mesh))[0][0]


class LoraFactors(nn.Module):
    """The two factors for some rows of a layer's weight, filled with NaN until they are initialized
    or loaded.

    Attributes:
        lora_A: [r, in], or [r, in/tp] of a row-parallel layer.
        lora_B: [out, r], or [out/tp, r] of a column-parallel layer.
        scaling: The factor of the product.
    """

    def __init__(
        self,
        rows: AdaptedRows,
        r: int,
        scaling: float,
        dropout: float,
        *,
        sequence_parallel: bool,
        mesh: ParallelMesh | None,
    ) -> None:
        super().__init__()
        self.rows = rows
        self.scaling = scaling
        self.mesh = mesh
        first = rows.first_factor(r)
        second = rows.second_factor(r)
        self.lora_A = _parameter(first, mesh)
        self.lora_B = _parameter(second, mesh)
        if isinstance(first, Shard):
            split_dim = -1
        else:
            split_dim = 1 if sequence_parallel else None
        self.dropout = _InputDropout(
            dropout, first if isinstance(first, Shard) else None, split_dim, mesh
        )
        self._takes_part = (
            rows.shard is not None and rows.shard.dim == 0 and not isinstance(second, Shard)
        )

    @property
    def r(self) -> int:
        return self.lora_A.shape[0]

    def project(self, x: Tensor, *, partial: bool) -> Tensor:
        """Returns x·Aᵀ·scaling, [..., in] -> [..., r].

        `partial`: each rank applies A to a part of the sequence.
        """
        first = self.lora_A.to(x.dtype)
        return (
            linear(self.dropout(x), copy_to_tp(first, self.mesh) if partial else first)
            * self.scaling
        )

    def expand(self, hidden: Tensor, *, partial: bool) -> Tensor:
        """Returns the product with this rank's rows of B, [..., r] -> [..., rows]; see `project`."""
        second = self.lora_B.to(hidden.dtype)
        second = copy_to_tp(second, self.mesh) if partial or self._takes_part else second
        return linear(hidden, self._own_rows(second, needed=True))

    def place(self) -> tuple[int, int]:
        """Returns where the rows that this rank computes with begin in the layer's output, and
        their number.
        """
        start, ranges = self.rows.local(tp_rank(self.mesh), tp_size(self.mesh), needed=True)
        return start, sum(
            stop - begin for begin, stop in ranges
        ) if self._takes_part else self.lora_B.shape[0]

    @torch.no_grad()
    def add_to(self, weight: Tensor) -> Tensor:
        """Returns this rank's part of a layer's weight with the product of the factors added,
        rounded once.
        """
        start, _ = self.rows.local(tp_rank(self.mesh), tp_size(self.mesh), needed=False)
        second = self._own_rows(self.lora_B.float(), needed=False)
        merged = weight.float().clone()
        merged[start : start + len(second)] += self.scaling * (second @ self.lora_A.float())
        return merged.to(weight.dtype)

    def _own_rows(self, second: Tensor, *, needed: bool) -> Tensor:
        if not self._takes_part or tp_size(self.mesh) == 1:
            return second
        _, ranges = self.rows.local(tp_rank(self.mesh), tp_size(self.mesh), needed=needed)
        return torch.cat([second[start:stop] for start, stop in ranges])

    def extra_repr(self) -> str:
        return f"r={self.r}, scaling={self.scaling:g}, rows {self.rows.first}..{self.rows.stop}"


class Adapter(nn.Module):
    """All factors of one layer. It is the submodule `adapter` of the layer, and runs in the layer's
    forward hook.

    Args:
        layer: One of `LINEARS`.
        factors: Name -> the factors, in the order of their rows. Those of `GateUpLinear` are named
            by `outputs`.
        outputs: For a layer with several outputs, the number of the output of each pair of factors.
    """

    def __init__(
        self, layer: Any, factors: dict[str, LoraFactors], outputs: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.split, self.outputs = split_of(layer), tuple(outputs)
        self.mesh: ParallelMesh | None = getattr(layer, "mesh", None)
        self.sequence_parallel = (
            bool(getattr(layer, "sequence_parallel", False)) and tp_size(self.mesh) > 1
        )
        self.hook: Any = None  # of `attach`
        self.enabled = True
        """Whether the layer's output has the adapter's product."""
        for name, pair in factors.items():
            self.add_module(name, pair)

    @property
    def factors(self) -> list[LoraFactors]:
        return [module for module in self.children() if isinstance(module, LoraFactors)]

    def forward(self, x: Tensor, output: Any) -> Any:
        """Returns the layer's output for the input x, with the adapters' products added."""
        factors = self.factors
        partial = self.sequence_parallel and self.split != "row"
        projected = [pair.project(x, partial=partial) for pair in factors]
        hidden = self._exchange(projected[0] if len(projected) == 1 else torch.cat(projected, -1))
        parts = torch.split(hidden, [pair.r for pair in factors], -1)
        partial = self.sequence_parallel and self.split != "column"
        added = [
            pair.expand(part, partial=partial) for pair, part in zip(factors, parts, strict=True)
        ]
        if self.outputs:
            by_output = dict(zip(self.outputs, added, strict=True))
            return tuple(
                own + by_output[n] if n in by_output else own for n, own in enumerate(output)
            )
        return _add_features(
            output, [(pair.place(), more) for pair, more in zip(factors, added, strict=True)]
        )

    def _exchange(self, hidden: Tensor) -> Tensor:
        """Returns x·Aᵀ as B takes it: summed over split features, or whole for split outputs."""
        if self.split == "none":
            return hidden
        if self.split == "row":
            return (reduce_scatter_sequence if self.sequence_parallel else reduce_from_tp)(
                hidden, self.mesh
            )
        return (gather_sequence if self.sequence_parallel else copy_to_tp)(hidden, self.mesh)


def _add_features(output: Tensor, added: list[tuple[tuple[int, int], Tensor]]) -> Tensor:
    """Adds each ((start, count), tensor) to the features [start, start + count) of the output."""
    if len(added) == 1 and added[0][1].shape == output.shape:
        return output + added[0][1]
    sizes: list[int] = []
    more: list[Tensor | None] = []
    position = 0
    for (start, count), tensor in added:
        sizes += [start - position, count]
        more += [None, tensor]
        position = start + count
    pieces = torch.split(output, [*sizes, output.shape[-1] - position], -1)
    changed = [
        piece if own is None else piece + own
        for piece, own in zip(pieces, [*more, None], strict=True)
    ]
    return torch.cat(changed, -1)


def attach(layer: nn.Module, adapter: Adapter) -> None:
    """Makes an adapter a part of a layer's forward pass, as its submodule `adapter`."""
    layer.add_module("adapter", adapter)
    adapter.hook = layer.register_forward_hook(_adapt)


def detach(layer: Any) -> None:
    """Reverses `attach`."""
    layer.adapter.hook.remove()
    del layer.adapter


def _adapt(layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    if not layer.adapter.enabled:
        return output
    return layer.adapter(inputs[0], output)
