"""Normalisation layers whose replicated parameters get the right gradient on a split sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..ops import layer_norm, rms_norm
from .communication import start_all_reduce
from .mesh import ParallelMesh, tp_size


class _LayerNormOfPart(Function):
    """LayerNorm of a part of the sequence. The ranks' gradients of weight and bias are summed in fp32 (fp64 for fp64)
    and rounded once: rounded before as well, 16-bit gradients would lose half as much precision again."""

    @staticmethod
    def forward(
        ctx, tensor: Tensor, weight: Tensor, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> Tensor:
        output, _, mean, rstd = torch.ops.shardzoo.layer_norm(tensor, None, weight, bias, eps)
        ctx.save_for_backward(tensor, weight, mean, rstd)
        ctx.has_bias, ctx.group = bias is not None, group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        tensor, weight, mean, rstd = ctx.saved_tensors
        own = torch.ops.shardzoo.layer_norm_backward(grads[0], None, tensor, weight, mean, rstd, ctx.has_bias)
        # Stacked, so that one all-reduce serves both gradients.
        parts = torch.stack(own[1:] if ctx.has_bias else own[1:2])
        total = start_all_reduce(parts, ctx.group)().to(weight.dtype)
        return own[0], total[0], total[1] if ctx.has_bias else None, None, None


class _RMSNormOfPart(Function):
    """RMSNorm of a part of the sequence, its weight's gradient summed as `_LayerNormOfPart` does."""

    @staticmethod
    def forward(ctx, tensor: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup) -> Tensor:
        output, _, rstd = torch.ops.shardzoo.rms_norm(tensor, None, weight, eps)
        ctx.save_for_backward(tensor, weight, rstd)
        ctx.group = group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        tensor, weight, rstd = ctx.saved_tensors
        tensor_grad, part = torch.ops.shardzoo.rms_norm_backward(grads[0], None, tensor, weight, rstd)
        return tensor_grad, start_all_reduce(part, ctx.group)().to(weight.dtype), None, None


class _Norm(nn.Module):
    def __init__(self, hidden_size: int, eps: float, sequence_parallel: bool, mesh: ParallelMesh | None):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.sequence_parallel, self.mesh = sequence_parallel, mesh
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, sequence_parallel={self.sequence_parallel}"


class LayerNorm(_Norm):
    """Layer normalisation over the last dimension (Ba et al. 2016, arXiv:1607.06450).

    sequence_parallel: the input is this rank's part of the sequence, so the parameters' gradients are summed over the
    tensor-parallel ranks, inside autograd, where every engine sees them. Input and output [..., H].
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__(hidden_size, eps, sequence_parallel, mesh)
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, tensor: Tensor) -> Tensor:
        if self.sequence_parallel and self.mesh is not None and tp_size(self.mesh) > 1:
            return _LayerNormOfPart.apply(tensor, self.weight, self.bias, self.eps, self.mesh.tp_group)
        return layer_norm(tensor, self.weight, self.bias, self.eps)


class RMSNorm(_Norm):
    """Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467) in the rounding order of transformers:
    computed in fp32, cast to the input's dtype, then multiplied by the weight.

    sequence_parallel: as for `LayerNorm`. Input and output [..., H].
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, sequence_parallel: bool = False, mesh: ParallelMesh | None = None
    ):
        super().__init__(hidden_size, eps, sequence_parallel, mesh)

    def forward(self, tensor: Tensor) -> Tensor:
        if self.sequence_parallel and self.mesh is not None and tp_size(self.mesh) > 1:
            return _RMSNormOfPart.apply(tensor, self.weight, self.eps, self.mesh.tp_group)
        return rms_norm(tensor, self.weight, self.eps)
