"""Implements the linear layers whose weights are split over the tensor-parallel ranks.

They follow Megatron-LM's tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) and its
sequence parallelism, which also splits the sequence (Korthikanti et al. 2022, arXiv:2205.05198).
With one rank, each layer is `ops.linear`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ops import autocast_arguments, in_inference_mode, linear, matmul
from ..ops.autograd import Function, once_differentiable
from .collectives import (
    SEQUENCE_DIM,
    copy_to_tp,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from .fused_products import gathered_product, scattered_product
from .main_gradients import find_main_gradient
from .mesh import ParallelMesh
from .packed import PackedParameter, packed_linear
from .parameter import SplitLayer, split_parameter
from .shard import Shard
from .shared_heads import gather_groups, gather_shared_heads


class ColumnParallelLinear(SplitLayer):
    """y = x Wᵀ + b with the output features split over the tensor-parallel ranks. Weight [out, in].

    Input [..., in], replicated. Output [..., out/tp], or [..., out] if gathered, in the input's
    dtype. Where tp does not divide the units, the ranks' parts differ by one.

    Args:
        groups: Sizes of the groups stacked along the output (fused Q, K, V; gate and up), each
            split separately.
        unit: Each rank's part of a group is a whole number of units, e.g. of head sizes.
        shared_kv_groups: Numbers of the groups, the last ones, that are key-value heads of grouped
            queries (see `AxisSplit`). Where ranks share them, a rank computes all heads that it
            needs; others lend it the rows.
        gather_output: Return all output features, in the unsplit order, on every rank.
        sequence_parallel: The input is this rank's part [B, S/tp, in] of the sequence.

    Raises:
        ValueError: The output features cannot be split over the ranks; the message names the sizes
            that work.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        groups: tuple[int, ...] | None = None,
        unit: int = 1,
        shared_kv_groups: tuple[int, ...] = (),
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel
        self.mesh = mesh
        self.shard = Shard(
            (out_features, in_features), 0, groups or (), unit, shared_kv_groups=shared_kv_groups
        )
        self.weight = split_parameter(self.shard, mesh)  # [out/tp, in]
        self.bias = None
        if bias:
            bias_shard = Shard(
                (out_features,), 0, groups or (), unit, shared_kv_groups=shared_kv_groups
            )
            self.bias = split_parameter(bias_shard, mesh)  # [out/tp]

        self._shares_heads = (
            mesh is not None
            and not gather_output
            and bool(self.shard.find_exchanged_groups(mesh.tp_size))
        )
        # See `cache_shared_heads`: None, or a list of at most one weight and bias.
        self._cached_heads: list[tuple[Tensor, Tensor | None]] | None = None

    def forward(self, tensor: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self._shares_heads and self.mesh is not None:
            weight, bias = self._gather_heads(self.mesh)
        output = column_parallel(
            tensor, weight, bias, sequence_parallel=self.sequence_parallel, mesh=self.mesh
        )
        if self.gather_output and self.mesh is not None and self.mesh.tp_size > 1:
            every_group = range(len(self.shard.groups))
            output = torch.cat(gather_groups(output, self.shard, every_group, self.mesh, -1), -1)
        return output

    def keep_shared_heads(self, keep: bool) -> None:
        """Starts or ends keeping the rows that other ranks lend; see `cache_shared_heads`."""
        self._cached_heads = [] if keep else None

    def _gather_heads(self, mesh: ParallelMesh) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of the weight and the bias that this rank computes with."""
        if self._cached_heads and in_inference_mode():
            return self._cached_heads[0]
        weight: Tensor = self.weight
        if isinstance(weight, PackedParameter):
            # These rows are kept for the backward pass as they are.
            weight = weight.unpack()
        rows = gather_shared_heads(weight, self.bias, self.shard, mesh)
        if self._cached_heads is not None and in_inference_mode():
            self._cached_heads.append(rows)
        return rows


@contextmanager
def cache_shared_heads(model: nn.Module) -> Generator[None]:
    """Within the context, forward passes in inference mode exchange shared key-value heads once.

    The first pass keeps the rows of the weights that other ranks lent; the weights must not change
    within the context.
    """
    layers = [module for module in model.modules() if isinstance(module, ColumnParallelLinear)]
    for layer in layers:
        layer.keep_shared_heads(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.keep_shared_heads(False)


class RowParallelLinear(SplitLayer):
    """y = x Wᵀ + b with the input features split over the tensor-parallel ranks. Weight [out, in].

    The bias is replicated and added once to the sum of the ranks' products. Input [..., in/tp].
    Output [..., out], or [B, S/tp, out] under sequence parallelism.

    Args:
        unit: Each rank's part of the input is a whole number of units, e.g. of head sizes.
        input_is_parallel: The input holds only this rank's features; otherwise it is replicated and
            split here.
        sequence_parallel: The output is this rank's part [B, S/tp, out] of the sequence.

    Raises:
        ValueError: The input features, or under sequence parallelism the sequence, cannot be split
            over the ranks; the message names the sizes that work.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        unit: int = 1,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel
        self.mesh = mesh
        self.shard = Shard((out_features, in_features), 1, unit=unit)
        self.weight = split_parameter(self.shard, mesh)  # [out, in/tp]
        self.bias = nn.Parameter(torch.full((out_features,), float("nan"))) if bias else None

    def forward(self, tensor: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if not self.input_is_parallel and self.mesh is not None:
            [(start, stop)] = self.shard.ranges(self.mesh.tp_rank, self.mesh.tp_size)
            tensor = copy_to_tp(tensor, self.mesh)[..., start:stop]
        if isinstance(weight, PackedParameter):
            # The first rank adds the bias.
            bias = self.bias if self.mesh is None or self.mesh.tp_rank == 0 else None
            partial = packed_linear(tensor, weight, bias)
            if self.sequence_parallel:
                return reduce_scatter_sequence(partial, self.mesh)
            return reduce_from_tp(partial, self.mesh)
        if self.mesh is None or self.mesh.tp_size == 1:
            if getattr(weight, "main_gradient", None) is not None:
                arguments = autocast_arguments(tensor, weight, self.bias)
                return _AccumulatingLinear.apply(*arguments)
            return linear(tensor, weight, self.bias)
        arguments = autocast_arguments(tensor, weight, self.bias)
        return _RowParallel.apply(*arguments, self.mesh.tp_group, self.sequence_parallel)


def column_parallel(
    tensor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    sequence_parallel: bool,
    mesh: ParallelMesh | None,
) -> Tensor:
    """Applies `linear` with this rank's rows of a weight.

    Args:
        tensor: [..., in], or [B, S/tp, in] under sequence parallelism.
        weight: [out/tp, in].
        bias: [out/tp].

    Returns:
        [..., out/tp].
    """
    if isinstance(weight, PackedParameter):
        whole = enter_column_parallel(tensor, sequence_parallel=sequence_parallel, mesh=mesh)
        return packed_linear(whole, weight, bias)
    if mesh is None or mesh.tp_size == 1:
        if getattr(weight, "main_gradient", None) is not None:
            return _AccumulatingLinear.apply(*autocast_arguments(tensor, weight, bias))
        return linear(tensor, weight, bias)
    arguments = autocast_arguments(tensor, weight, bias)
    return _ColumnParallel.apply(*arguments, mesh.tp_group, sequence_parallel)


class _AccumulatingLinear(Function):
    """Implements `linear` where the weight's gradient is added to a sum; see `MainGradient`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        return linear(tensor, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        grad = grads[0]
        tensor, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        input_grad = _multiply_input_grad(grad, weight) if needs_input else None
        weight_grad = _find_weight_grad(grad, tensor, weight) if needs_weight else None
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        return input_grad, weight_grad, bias_grad


def enter_column_parallel(
    tensor: Tensor, *, sequence_parallel: bool, mesh: ParallelMesh | None
) -> Tensor:
    """Returns the whole input of a column-parallel layer, whose gradient is summed over the ranks.

    Args:
        tensor: [..., in], or [B, S/tp, in] under sequence parallelism.
    """
    if sequence_parallel:
        return gather_sequence(tensor, mesh)
    return copy_to_tp(tensor, mesh)


class _ColumnParallel(Function):
    """Multiplies the whole input by this rank's rows of the weight.

    The backward pass overlaps communication with matrix products. Under sequence parallelism only
    this rank's part of the input is saved; it is gathered while the input gradient is computed. The
    input gradient is summed while the weight gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        if not sequence_parallel:
            return linear(tensor, weight, bias)
        fused = gathered_product(tensor, weight.t(), bias, group)
        if fused is not None:
            return fused[0]
        whole = start_all_gather(tensor, SEQUENCE_DIM, group)()
        return linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        grad = grads[0]
        tensor, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        input_grad = None
        weight_grad = None
        bias_grad = None

        # The gather of the input runs during the product that follows.
        finish_gather = None
        if needs_weight and ctx.sequence_parallel:
            finish_gather = start_all_gather(tensor, SEQUENCE_DIM, ctx.group)
        if needs_input:
            input_grad = _multiply_input_grad(grad, weight)
        whole = tensor if finish_gather is None else finish_gather()

        # The sum of the input's gradient runs during the product that follows.
        finish_sum = None
        if input_grad is not None and ctx.sequence_parallel:
            finish_sum = start_reduce_scatter(input_grad, SEQUENCE_DIM, ctx.group)
        elif input_grad is not None:
            finish_sum = start_all_reduce(input_grad, ctx.group)
        if needs_weight:
            weight_grad = _find_weight_grad(grad, whole, weight)
        if needs_bias:
            bias_grad = grad.flatten(0, -2).sum(0)
        if finish_sum is not None:
            input_grad = finish_sum()
        return input_grad, weight_grad, bias_grad, None, None


class _RowParallel(Function):
    """Multiplies this rank's features by its columns of the weight, and sums the ranks' products.

    Only the first rank adds the bias. Its matrix product adds the bias before rounding, so the bias
    causes no extra rounding of a 16-bit result. In the backward pass every rank has the gradient of
    the whole sequence, so the bias gradient needs no communication.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        if sequence_parallel:
            fused = scattered_product(tensor, weight.t(), bias, group)
            if fused is not None:
                return fused
        own_bias = bias if group.rank() == 0 else None
        partial = linear(tensor, weight, own_bias)
        if sequence_parallel:
            return start_reduce_scatter(partial, SEQUENCE_DIM, group)()
        return start_all_reduce(partial, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        grad = grads[0]
        tensor, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        input_grad = None
        if ctx.sequence_parallel:
            fused = None
            if needs_input:
                fused = gathered_product(grad, weight, None, ctx.group)
            if fused is None:
                grad = start_all_gather(grad, SEQUENCE_DIM, ctx.group)()
            else:
                input_grad, grad = fused
        if needs_input and input_grad is None:
            input_grad = _multiply_input_grad(grad, weight)
        weight_grad = _find_weight_grad(grad, tensor, weight) if needs_weight else None
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        return input_grad, weight_grad, bias_grad, None, None


def _multiply_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """Returns the gradient [..., in] of the input, from [..., out] and [out, in]."""
    return torch.unflatten(matmul(grad.flatten(0, -2), weight), 0, grad.shape[:-1])


def _find_weight_grad(grad: Tensor, tensor: Tensor, weight: Tensor) -> Tensor | None:
    """Returns the gradient [out, in] of the weight, from [..., out] and [..., in]; None if it was
    added to the weight's main gradient.
    """
    main = find_main_gradient(weight)
    if main is not None:
        main.add(grad, tensor)
        return None
    return matmul(grad.flatten(0, -2).t(), tensor.flatten(0, -2))
