"""The feed-forward parts of a block, whose inner width is split over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import (
    ColumnParallelLinear,
    Dropout,
    ParallelMesh,
    RowParallelLinear,
    Shard,
    column_parallel,
    tp_size,
)
from ...mpu.linear import enter_column_parallel
from ...mpu.packed import PackedParameter, packed_linear
from ...mpu.parameter import split_parameter
from ...ops import bias_gelu, empty_pooled, geglu, in_inference_mode, linear, swiglu
from ...ops.autograd import Function, once_differentiable
from ...ops.device import writes_gradients_in_place
from ..parallel_config import ParallelConfig
from .activation_functions import find_activation, gelu_tanh

WITH_BIAS: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    F.gelu: bias_gelu,
    gelu_tanh: partial(bias_gelu, approximate="tanh"),
}

GATES: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    F.gelu: geglu,
    gelu_tanh: partial(geglu, approximate="tanh"),
    F.silu: swiglu,
}


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
        shared: dict[str, Any] = {
            "bias": bias,
            "sequence_parallel": parallel_config.sequence_parallel,
            "mesh": mesh,
        }
        self.activation = find_activation(activation)
        self.up = ColumnParallelLinear(hidden_size, inner_size, **shared)
        self.dropout = Dropout(dropout, split_dim=-1, count=inner_size, mesh=mesh)
        self.down = RowParallelLinear(inner_size, hidden_size, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        up = self.up
        bias = up.bias
        add_bias_and_activate = None if bias is None else WITH_BIAS.get(self.activation)
        # An adapter adds to the output of `up`, so the bias cannot wait for the activation (see
        # `lora.Adapter`).
        if bias is None or add_bias_and_activate is None or hasattr(up, "adapter"):
            return self.down(self.dropout(self.activation(up(x))))
        y = column_parallel(
            x, up.weight, None, sequence_parallel=up.sequence_parallel, mesh=up.mesh
        )  # [B, S, Fp]
        y = add_bias_and_activate(y, bias.to(y.dtype))
        return self.down(self.dropout(y))


class GatedMLP(nn.Module):
    """down(dropout(activation(gate(x)) · up(x))) (Shazeer 2020, arXiv:2002.05202).

    Args:
        fused: Whether gate and up are one parameter, [gate|up], as the files of some families store
            them. Otherwise any number of ranks can share the inner width.
        bias: Whether the projections have biases; only of a fused one.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        fused: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = {
            "sequence_parallel": parallel_config.sequence_parallel,
            "mesh": mesh,
        }
        self.activation = find_activation(activation)
        self.dropout = Dropout(
            dropout, split_dim=-1, count=inner_size if fused else None, mesh=mesh
        )
        if fused:
            groups = (inner_size, inner_size)
            self.gate_up = ColumnParallelLinear(
                hidden_size, 2 * inner_size, bias=bias, groups=groups, **shared
            )
            self.down = RowParallelLinear(inner_size, hidden_size, bias=bias, **shared)
        else:
            self.gate_up = GateUpLinear(hidden_size, inner_size, **shared)
            self.down = DownLinear(inner_size, hidden_size, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        projected = self.gate_up(x)
        if isinstance(projected, Tensor):  # of a fused projection
            projected = split_in_halves(projected)
        gate, up = projected  # [B, S, Fp] each
        multiply_gate = GATES.get(self.activation)
        if multiply_gate is None:
            product = self.activation(gate) * up
        else:
            product = multiply_gate(gate, up)
        return self.down(self.dropout(product))


def split_in_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 2F] -> two tensors [..., F]"""
    if writes_gradients_in_place(x):
        return _Halves.apply(x)
    first, second = x.chunk(2, dim=-1)
    return first, second


class _Halves(Function):
    """Implements `split_in_halves` on a CPU.

    The backward pass writes both gradients into their places.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        ctx.shape = x.shape
        return x.chunk(2, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        whole = empty_pooled(grads[0], *ctx.shape)
        for half, grad in zip(whole.chunk(2, dim=-1), grads, strict=True):
            half.copy_(grad)
        return whole


class GateUpLinear(nn.Module):
    """Computes x·gateᵀ and x·upᵀ, without biases, with the inner features split over the ranks and
    one exchange.

    If the number of ranks does not divide the inner width (1024 in mT5-small over 3), the last
    rank's rows end with zeros. They stay zero: the gated product of zeros is zero, so neither they
    nor the columns of `DownLinear` that multiply them get a gradient.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.mesh = mesh
        self.shard = Shard((inner_size, hidden_size), 0, pad_multiple=1)
        self.gate = split_parameter(self.shard, mesh)  # [Fp, H]
        self.up = split_parameter(self.shard, mesh)  # [Fp, H]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [B, S, H], or [B, S/tp, H] under sequence parallelism, to two tensors [B, S, Fp]."""
        if isinstance(self.gate, PackedParameter) and isinstance(self.up, PackedParameter):
            whole = enter_column_parallel(
                x, sequence_parallel=self.sequence_parallel, mesh=self.mesh
            )
            return packed_linear(whole, self.gate, None), packed_linear(whole, self.up, None)
        if tp_size(self.mesh) == 1 or (in_inference_mode() and not self.sequence_parallel):
            return linear(x, self.gate), linear(x, self.up)  # no exchange is needed
        # Joining the weights is cheap compared with the products, and there is one exchange instead
        # of two.
        weight = torch.cat([self.gate, self.up])
        both = column_parallel(
            x, weight, None, sequence_parallel=self.sequence_parallel, mesh=self.mesh
        )
        gate, up = both.chunk(2, dim=-1)
        return gate, up

    def extra_repr(self) -> str:
        return f"2 x {self.shard.describe()}, sequence_parallel={self.sequence_parallel}"


class DownLinear(RowParallelLinear):
    """The output projection of `GatedMLP`, without a bias; its input is split like the output of
    `GateUpLinear`.
    """

    def __init__(
        self,
        inner_size: int,
        hidden_size: int,
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        size = tp_size(mesh)
        padded = -(-inner_size // size) * size
        super().__init__(
            padded, hidden_size, bias=False, sequence_parallel=sequence_parallel, mesh=mesh
        )
        self.in_features = inner_size
        self.shard = Shard((hidden_size, inner_size), 1, pad_multiple=1)
        self.weight = split_parameter(self.shard, mesh)  # [H, Fp]
