"""The feed-forward blocks, split over their inner width."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import ColumnParallelLinear, Dropout, ParallelMesh, RowParallelLinear
from ...mpu.linear import column_parallel
from ...ops import bias_gelu, geglu, relu, swiglu
from .gated_linear import DownLinear, GateUpLinear
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
