"""Normalisation layers whose replicated parameters get the right gradient on a split sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import layer_norm, rms_norm
from .collectives import copy_to_tp
from .mesh import ParallelMesh, tp_size


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
        weight, bias = self.weight, self.bias
        if self.sequence_parallel and tp_size(self.mesh) > 1:
            # Stacked, so that one all-reduce serves both gradients.
            both = copy_to_tp(torch.stack([weight] if bias is None else [weight, bias]), self.mesh)
            weight, bias = both[0], None if bias is None else both[1]
        if tensor.dtype.itemsize < 4:
            # The fused gradient of a 16-bit weight is rounded before the ranks add theirs, which on a split sequence
            # costs half as much precision again as on one rank; torch keeps the two closer.
            return F.layer_norm(tensor, (self.hidden_size,), weight, bias, self.eps)
        return layer_norm(tensor, weight, bias, self.eps)


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
        weight = copy_to_tp(self.weight, self.mesh) if self.sequence_parallel else self.weight
        return rms_norm(tensor, weight, self.eps)
