"""Linear layers that every tensor-parallel rank holds whole."""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import ParallelMesh, copy_to_tp


class ReplicatedLinear(nn.Linear):
    """y = x Wᵀ + b with the same weight on every rank. Input [..., in], output [..., out].

    Args:
        bias: Whether there is a b.
        sequence_parallel: The input is this rank's part of the sequence, so the parameters'
            gradients are summed over the tensor-parallel ranks.
        wide: Whether to compute in fp32 or wider, and to return that.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        wide: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.sequence_parallel = sequence_parallel
        self.wide = wide
        self.mesh = mesh

    def forward(self, input: Tensor) -> Tensor:
        if self.wide:
            return self._forward_wide(input)
        if not self.sequence_parallel:
            return F.linear(input, self.weight, self.bias)
        # The gradients of the weight and of the bias, if there is one, are summed by one
        # all-reduce.
        own = list(self.parameters(recurse=False))
        joined = copy_to_tp(torch.cat([parameter.flatten() for parameter in own]), self.mesh)
        weight, *bias = torch.split(joined, [parameter.numel() for parameter in own])
        return F.linear(input, weight.view_as(self.weight), *bias)

    def _forward_wide(self, input: Tensor) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        own = [parameter.to(wide) for parameter in self.parameters(recurse=False)]
        if self.sequence_parallel:
            own = [copy_to_tp(parameter, self.mesh) for parameter in own]
        return F.linear(input.to(wide), *own)
