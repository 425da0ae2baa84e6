"""The feed-forward products of a gated block, for inner widths that the ranks need not divide."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...mpu import ParallelMesh, RowParallelLinear, Shard, tp_size
from ...mpu.linear import column_parallel
from ...mpu.parameter import split_parameter
from ...ops import in_inference_mode, linear


class GateUpLinear(nn.Module):
    """x·gateᵀ and x·upᵀ with the inner features split over the ranks, by one exchange for both. No biases.

    Where the ranks do not divide the inner width (1024 of mT5-small over 3), the last rank's rows end with zeros.
    They stay zeros: the gated product of zeros is zero, so neither they nor what they meet get a gradient.
    """

    def __init__(
        self, hidden_size: int, inner_size: int, *, sequence_parallel: bool = False, mesh: ParallelMesh | None = None
    ) -> None:
        super().__init__()
        self.sequence_parallel, self.mesh = sequence_parallel, mesh
        self.shard = Shard((inner_size, hidden_size), 0, pad_multiple=1)
        self.gate = split_parameter(self.shard, mesh)  # [Fp, H]
        self.up = split_parameter(self.shard, mesh)  # [Fp, H]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, H], or [B, S/tp, H] -> twice [B, S, Fp]"""
        if tp_size(self.mesh) == 1 or (in_inference_mode() and not self.sequence_parallel):
            return linear(x, self.gate), linear(x, self.up)  # nothing to exchange
        weight = torch.cat([self.gate, self.up])  # little beside the products; it halves the exchanges
        both = column_parallel(x, weight, None, sequence_parallel=self.sequence_parallel, mesh=self.mesh)
        gate, up = both.chunk(2, dim=-1)
        return gate, up

    def extra_repr(self) -> str:
        return f"2 x {self.shard.describe()}, sequence_parallel={self.sequence_parallel}"


class DownLinear(RowParallelLinear):
    """The product back, whose input is split as `GateUpLinear` splits its output. No bias."""

    def __init__(
        self, inner_size: int, hidden_size: int, *, sequence_parallel: bool = False, mesh: ParallelMesh | None = None
    ) -> None:
        size = tp_size(mesh)
        padded = -(-inner_size // size) * size
        super().__init__(padded, hidden_size, bias=False, sequence_parallel=sequence_parallel, mesh=mesh)
        self.in_features = inner_size
        self.shard = Shard((hidden_size, inner_size), 1, pad_multiple=1)
        self.weight = split_parameter(self.shard, mesh)  # [H, Fp]
