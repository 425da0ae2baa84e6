"""The residual stream of a block: what is added to it, and the norm that follows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...mpu import Dropout, ParallelMesh
from ..parallel_config import ParallelConfig


def add_and_norm(
    norm: nn.Module, dropout: Dropout, branch: Tensor, residual: Tensor, *, clamp_fp16: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns (norm(h), h) with h = residual + dropout(branch).

    If nothing is dropped, the norm's operator adds.
    """
    clamps = clamp_fp16 and residual.dtype == torch.float16
    if not dropout.drops and not clamps:
        return norm(branch, residual, return_residual=True)
    h = dropout(branch, residual)
    return norm(clamp_fp16_overflow(h) if clamps else h, return_residual=True)


def clamp_fp16_overflow(x: Tensor) -> Tensor:
    """Clamps an fp16 residual stream, as in transformers, because T5's overflows in fp16."""
    if x.dtype != torch.float16:
        return x
    most = torch.finfo(x.dtype).max - 1000
    return x.clamp(-most, most)


def residual_dropout(
    p: float, mesh: ParallelMesh | None, parallel_config: ParallelConfig
) -> Dropout:
    """Returns the dropout of a tensor [B, S, H], whose sequence is split under sequence
    parallelism.
    """
    return Dropout(p, split_dim=1 if parallel_config.sequence_parallel else None, mesh=mesh)
