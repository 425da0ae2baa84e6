"""Linear layers split over tensor-parallel ranks (Shoeybi et al. 2019, arXiv:1909.08053; with the sequence dimension
split too, Korthikanti et al. 2022, arXiv:2205.05198)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..ops import linear, multiply
from .collectives import SEQUENCE_DIM, gather_from_tp, scatter_to_tp
from .communication import start_all_gather, start_all_reduce, start_reduce_scatter
from .mesh import ParallelMesh, tp_size
from .parameter import SplitLayer, split_parameter
from .shard import Shard


def _input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    return multiply(grad.flatten(0, -2), weight).unflatten(0, grad.shape[:-1])  # [..., in]


def _weight_grad(grad: Tensor, tensor: Tensor) -> Tensor:
    return multiply(grad.flatten(0, -2).t(), tensor.flatten(0, -2))  # [out, in]


class _ColumnParallel(Function):
    """Every rank multiplies the whole input by its rows of the weight.

    Backward hides communication behind products: the gather of the input (which under sequence parallelism is saved
    as this rank's part only) behind the input gradient, the sum of the input gradient behind the weight gradient.
    """

    @staticmethod
    def forward(
        ctx, tensor: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, sequence_parallel: bool
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        whole = start_all_gather(tensor, SEQUENCE_DIM, group)() if sequence_parallel else tensor
        return linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        tensor, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gather = None
        if needs_weight and ctx.sequence_parallel:
            gather = start_all_gather(tensor, SEQUENCE_DIM, ctx.group)
        input_grad = reduction = weight_grad = None
        if needs_input:
            input_grad = _input_grad(grad, weight)
        whole = gather() if gather else tensor
        if input_grad is not None:
            if ctx.sequence_parallel:
                reduction = start_reduce_scatter(input_grad, SEQUENCE_DIM, ctx.group)
            else:
                reduction = start_all_reduce(input_grad, ctx.group)
        if needs_weight:
            weight_grad = _weight_grad(grad, whole)
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        return reduction() if reduction else None, weight_grad, bias_grad, None, None


class _RowParallel(Function):
    """Every rank multiplies its features by its columns of the weight; the partial products are summed in place.

    The bias enters once, on the first rank: its product adds it before rounding, so a 16-bit result is rounded as
    often as without. Backward has the gradient of the whole sequence on every rank anyway, so the bias gradient needs
    no communication.
    """

    @staticmethod
    def forward(
        ctx, tensor: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, sequence_parallel: bool
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        partial = linear(tensor, weight, bias if group.rank() == 0 else None)
        if sequence_parallel:
            return start_reduce_scatter(partial, SEQUENCE_DIM, group)()
        return start_all_reduce(partial, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        tensor, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = start_all_gather(grads[0], SEQUENCE_DIM, ctx.group)() if ctx.sequence_parallel else grads[0]
        input_grad = _input_grad(grad, weight) if needs_input else None
        weight_grad = _weight_grad(grad, tensor) if needs_weight else None
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        return input_grad, weight_grad, bias_grad, None, None


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What `torch.autocast` does to a linear layer's arguments; a custom function must do it itself."""
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def column_parallel(
    tensor: Tensor, weight: Tensor, bias: Tensor | None, *, sequence_parallel: bool, mesh: ParallelMesh | None
) -> Tensor:
    """`linear` with this rank's rows of the weight: [..., in], or [B, S/tp, in] -> [..., out/tp]."""
    if mesh is None or tp_size(mesh) == 1:
        return linear(tensor, weight, bias)
    return _ColumnParallel.apply(*autocast(tensor, weight, bias), mesh.tp_group, sequence_parallel)


class ColumnParallelLinear(SplitLayer):
    """y = x Wᵀ + b with the output features split over the tensor-parallel ranks. Weight [out, in].

    groups: sizes of the blocks stacked along the output (fused Q, K, V; gate and up), each split separately.
    unit: a rank's piece of each block is a whole number of units, e.g. the head size.
    gather_output: return all output features, in the unsplit order, on every rank.
    sequence_parallel: the input is this rank's part [B, S/tp, in] of the sequence.

    Input [..., in], replicated. Output [..., out/tp], or [..., out] if gathered, in the input's dtype. Raises
    `ValueError` if the output features cannot be split over the ranks, naming the sizes that work.
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
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.sequence_parallel, self.mesh = gather_output, sequence_parallel, mesh
        groups = tuple(groups or ())
        self.shard = Shard((out_features, in_features), 0, groups, unit)
        self.weight = split_parameter(self.shard, mesh)  # [out/tp, in]
        self.bias = split_parameter(Shard((out_features,), 0, groups, unit), mesh) if bias else None  # [out/tp]

    def forward(self, tensor: Tensor) -> Tensor:
        output = column_parallel(
            tensor, self.weight, self.bias, sequence_parallel=self.sequence_parallel, mesh=self.mesh
        )
        if not self.gather_output or tp_size(self.mesh) == 1:
            return output
        return self._unsplit_order(gather_from_tp(output, self.mesh))

    def _unsplit_order(self, gathered: Tensor) -> Tensor:
        """Rank-major features -> block-major features. gathered: [..., out]"""
        size = tp_size(self.mesh)
        if len(self.shard.groups) < 2:
            return gathered
        widths = [group // size for group in self.shard.groups]
        pieces = gathered.split(widths * size, dim=-1)  # rank 0's blocks, rank 1's blocks, ...
        return torch.cat([piece for block in range(len(widths)) for piece in pieces[block :: len(widths)]], dim=-1)


class RowParallelLinear(SplitLayer):
    """y = x Wᵀ + b with the input features split over the tensor-parallel ranks. Weight [out, in].

    The bias is replicated and added once to the sum of the ranks' products.

    unit: a rank's piece of the input is a whole number of units, e.g. the head size.
    input_is_parallel: the input is already this rank's features; otherwise it is replicated and split here.
    sequence_parallel: the output is this rank's part [B, S/tp, out] of the sequence.

    Input [..., in/tp]. Output [..., out], or [B, S/tp, out]. Raises `ValueError` if the input features, or under
    sequence parallelism the sequence, cannot be split over the ranks, naming the sizes that work.
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
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel, self.sequence_parallel, self.mesh = input_is_parallel, sequence_parallel, mesh
        self.shard = Shard((out_features, in_features), 1, unit=unit)
        self.weight = split_parameter(self.shard, mesh)  # [out, in/tp]
        self.bias = nn.Parameter(torch.full((out_features,), float("nan"))) if bias else None

    def forward(self, tensor: Tensor) -> Tensor:
        if not self.input_is_parallel:
            tensor = scatter_to_tp(tensor, self.mesh)
        if self.mesh is None or tp_size(self.mesh) == 1:
            return linear(tensor, self.weight, self.bias)
        arguments = autocast(tensor, self.weight, self.bias)
        return _RowParallel.apply(*arguments, self.mesh.tp_group, self.sequence_parallel)
