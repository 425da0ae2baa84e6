"""Tensor-parallel collectives that autograd understands. Without a mesh, or with one rank, each returns its input.

| function                  | forward            | backward                                         |
|---------------------------|--------------------|--------------------------------------------------|
| `copy_to_tp`              | identity           | all-reduce                                       |
| `reduce_from_tp`          | all-reduce         | identity                                         |
| `gather_from_tp`          | all-gather         | own share                                        |
| `scatter_to_tp`           | own share          | all-gather                                       |
| `gather_sequence`         | all-gather (dim 1) | reduce-scatter, or own share (`partial_grad`)    |
| `scatter_sequence`        | own share (dim 1)  | all-gather                                       |
| `reduce_scatter_sequence` | reduce-scatter     | all-gather                                       |

Every one keeps the dtype, accepts non-contiguous tensors, and leaves its input and its incoming gradient unchanged.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .communication import local_slice, start_all_gather, start_all_reduce, start_reduce_scatter
from .mesh import ParallelMesh, tp_size

SEQUENCE_DIM = 1


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


class _Copy(Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return start_all_reduce(_fresh(grads[0]), ctx.group)(), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return start_all_reduce(_fresh(tensor), group)()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return grads[0], None


class _Gather(Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, dim: int, group: dist.ProcessGroup, partial_grad: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.partial_grad = dim, group, partial_grad
        return start_all_gather(tensor, dim, group)()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        if ctx.partial_grad:
            return start_reduce_scatter(grads[0], ctx.dim, ctx.group)(), None, None, None
        return local_slice(grads[0], ctx.dim, ctx.group), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, dim: int, group: dist.ProcessGroup, partial: bool) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_reduce_scatter(tensor, dim, group)() if partial else local_slice(tensor, dim, group)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return start_all_gather(grads[0], ctx.dim, ctx.group)(), None, None, None


def copy_to_tp(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Enter a tensor-parallel region with a replicated tensor: its gradient is the sum of the ranks' gradients.

    Also right for a replicated parameter that each rank applies to its own part of the sequence.
    """
    return tensor if mesh is None or tp_size(mesh) == 1 else _Copy.apply(tensor, mesh.tp_group)


def reduce_from_tp(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Leave a tensor-parallel region: the sum of the ranks' partial results, replicated."""
    return tensor if mesh is None or tp_size(mesh) == 1 else _Reduce.apply(tensor, mesh.tp_group)


def gather_from_tp(tensor: Tensor, mesh: ParallelMesh | None, dim: int = -1) -> Tensor:
    """Concatenate the ranks' tensors along `dim`; what follows must be the same computation on every rank."""
    return tensor if mesh is None or tp_size(mesh) == 1 else _Gather.apply(tensor, dim, mesh.tp_group, False)


def scatter_to_tp(tensor: Tensor, mesh: ParallelMesh | None, dim: int = -1) -> Tensor:
    """This rank's share of a replicated tensor along `dim`. Raises `ValueError` if that does not divide."""
    return tensor if mesh is None or tp_size(mesh) == 1 else _Scatter.apply(tensor, dim, mesh.tp_group, False)


def gather_sequence(tensor: Tensor, mesh: ParallelMesh | None, *, partial_grad: bool = True) -> Tensor:
    """[B, S/tp, ...] -> [B, S, ...].

    partial_grad: True when tensor-parallel layers follow, so that each rank holds a part of the gradient and the
    parts are summed; False when every rank goes on with the same computation.
    """
    if mesh is None or tp_size(mesh) == 1:
        return tensor
    return _Gather.apply(tensor, SEQUENCE_DIM, mesh.tp_group, partial_grad)


def scatter_sequence(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """[B, S, ...] replicated -> this rank's [B, S/tp, ...]. Raises `ValueError` if S does not divide."""
    return scatter_to_tp(tensor, mesh, SEQUENCE_DIM)


def reduce_scatter_sequence(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Partial [B, S, ...] -> the sum's [B, S/tp, ...] of this rank. Raises `ValueError` if S does not divide."""
    if mesh is None or tp_size(mesh) == 1:
        return tensor
    return _Scatter.apply(tensor, SEQUENCE_DIM, mesh.tp_group, True)
