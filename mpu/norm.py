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


class _SequenceParallelNorm(Function):
    """The operator `name` on a part of the sequence. The ranks' gradients of its parameters, weight and perhaps bias,
    are summed in fp32 (fp64 for fp64) and rounded once: rounded before as well, 16-bit gradients would lose half as
    much precision again."""

    @staticmethod
    def forward(ctx, name: str, group: dist.ProcessGroup, eps: float, tensor: Tensor, *parameters: Tensor | None):
        output, _, *statistics = getattr(torch.ops.shardzoo, name)(tensor, None, *parameters, eps)
        ctx.save_for_backward(tensor, parameters[0], *statistics)
        ctx.operator, ctx.group = getattr(torch.ops.shardzoo, f"{name}_backward"), group
        ctx.has_bias = [parameter is not None for parameter in parameters[1:]]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        tensor, weight, *statistics = ctx.saved_tensors
        own, *parts = ctx.operator(grads[0], None, tensor, weight, *statistics, *ctx.has_bias)
        parts = torch.stack(parts[: 1 + sum(ctx.has_bias)])  # so that one all-reduce serves both
        total = start_all_reduce(parts, ctx.group)().to(weight.dtype)
        return None, None, None, own, *total, *[None] * ctx.has_bias.count(False)


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
            return _SequenceParallelNorm.apply(
                "layer_norm", self.mesh.tp_group, self.eps, tensor, self.weight, self.bias
            )
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
            return _SequenceParallelNorm.apply("rms_norm", self.mesh.tp_group, self.eps, tensor, self.weight)
        return rms_norm(tensor, self.weight, self.eps)
