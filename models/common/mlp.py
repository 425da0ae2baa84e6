"""Feed-forward blocks, plain and gated, split over their inner width."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import ColumnParallelLinear, Dropout, ParallelMesh, RowParallelLinear, Shard, tp_size
from ...mpu.layers import column_parallel
from ...mpu.parameter import split_parameter
from ...ops import bias_gelu, geglu, in_inference_mode, linear, relu, swiglu
from .parallel_config import ParallelConfig

gelu_tanh = partial(F.gelu, approximate="tanh")

# transformers' names; "gelu_new" and its like are the tanh approximation.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
    "silu": F.silu,
    "swish": F.silu,
}
WITH_BIAS: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    F.gelu: bias_gelu,
    gelu_tanh: partial(bias_gelu, approximate="tanh"),
}
GATES: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    F.gelu: geglu,
    gelu_tanh: partial(geglu, approximate="tanh"),
    F.silu: swiglu,
}


def find_activation(name: str) -> Callable[[Tensor], Tensor]:
    """ValueError for a name that is not transformers'."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class MLP(nn.Module):
    """down(dropout(activation(up(x))))."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        shared = {"bias": bias, "sequence_parallel": parallel_config.sequence_parallel, "mesh": mesh}
        self.activation = find_activation(activation)
        self.up = ColumnParallelLinear(hidden_size, inner_size, **shared)
        self.dropout = Dropout(dropout, split_dim=-1, mesh=mesh)
        self.down = RowParallelLinear(inner_size, hidden_size, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        fused = None if self.up.bias is None else WITH_BIAS.get(self.activation)
        if fused is None or self.up.bias is None:
            return self.down(self.dropout(self.activation(self.up(x))))
        y = column_parallel(x, self.up.weight, None, sequence_parallel=self.up.sequence_parallel, mesh=self.up.mesh)
        return self.down(self.dropout(fused(y, self.up.bias.to(y.dtype))))  # y: [B, S, Fp]


class GatedMLP(nn.Module):
    """down(dropout(activation(gate(x)) · up(x))), without biases (Shazeer 2020, arXiv:2002.05202).

    Any number of ranks can share the inner width.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        dropout: float = 0.0,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        shared = {"sequence_parallel": parallel_config.sequence_parallel, "mesh": mesh}
        self.activation = find_activation(activation)
        self.gate_up = GateUpLinear(hidden_size, inner_size, **shared)
        self.dropout = Dropout(dropout, split_dim=-1, mesh=mesh)
        self.down = DownLinear(inner_size, hidden_size, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        gate, up = self.gate_up(x)  # [B, S, Fp] each
        fused = GATES.get(self.activation)
        product = self.activation(gate) * up if fused is None else fused(gate, up)
        return self.down(self.dropout(product))


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
