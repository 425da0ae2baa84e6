"""Layers whose parameters every tensor-parallel rank holds whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import ParallelMesh, copy_to_tp, gather_sequence


class ReplicatedLinear(nn.Linear):
    """y = x Wᵀ + b with the same weight on every rank.

    sequence_parallel: the input is this rank's part of the sequence, so the parameters' gradients are summed over
    the tensor-parallel ranks. Input [..., in], output [..., out].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.sequence_parallel, self.mesh = sequence_parallel, mesh

    def forward(self, input: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return F.linear(input, self.weight, self.bias)
        joined = torch.cat([self.weight.flatten(), self.bias])  # one all-reduce of the gradient for both
        weight, bias = copy_to_tp(joined, self.mesh).split([self.weight.numel(), self.bias.numel()])
        return F.linear(input, weight.view_as(self.weight), bias)


def first_token(x: Tensor, *, sequence_parallel: bool, mesh: ParallelMesh | None) -> Tensor:
    """The first position's hidden state, on every rank: [B, S, H], or [B, S/tp, H] -> [B, H]"""
    if sequence_parallel:
        x = gather_sequence(x[:, :1], mesh, partial_grad=False)  # [B, tp, H], each rank's first position
    return x[:, 0]
