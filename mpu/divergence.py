"""Computes the Kullback-Leibler divergence of logits that are split along the vocabulary, without
gathering them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import reduce_from_tp
from .mesh import ParallelMesh


def vocab_parallel_divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    num_classes: int,
    temperature: float = 1.0,
    mesh: ParallelMesh | None = None,
) -> Tensor:
    """Returns the divergence of a student's distribution from its teacher's for each token, fp32
    [...].

    It is the sum of p (log p - log q) over the vocabulary, of the teacher's softmax p and the
    student's q of logits that are divided by the temperature (Hinton et al., 2015). Only the logits
    of the student get gradients. The ranks exchange five numbers a token.

    Args:
        logits: [..., Vp], this rank's columns.
        teacher_logits: [..., Vp], the same columns of the teacher.
        num_classes: The vocabulary size without padding; later columns are padding.
    """
    first = 0 if mesh is None else mesh.tp_rank * logits.shape[-1]
    kept = min(max(num_classes - first, 0), logits.shape[-1])
    # A rank that holds padding alone takes part with values that vanish in the softmax.
    padding = torch.arange(logits.shape[-1], device=logits.device) >= kept
    student = _shift(logits, padding, temperature, mesh)
    with torch.no_grad():
        teacher = _shift(teacher_logits, padding, temperature, mesh)
        chances = teacher.exp()
        teacher_sum = reduce_from_tp(chances.sum(-1), mesh)  # [...]
        chances = chances / teacher_sum[..., None]
    student_sum = reduce_from_tp(student.exp().sum(-1), mesh)
    gaps = (chances * (teacher - student)).sum(-1)
    return reduce_from_tp(gaps, mesh) + student_sum.log() - teacher_sum.log()


def _shift(
    logits: Tensor, padding: Tensor, temperature: float, mesh: ParallelMesh | None
) -> Tensor:
    """Returns logits in fp32 or wider, divided by the temperature, whose largest value is 0."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    wide = wide.masked_fill(padding, -1e4)
    largest = wide.detach().amax(-1, keepdim=True)
    if mesh is not None and mesh.tp_size > 1:
        cast(Any, dist).all_reduce(largest, dist.ReduceOp.MAX, group=mesh.tp_group)
    return (wide - largest).clamp(min=-1e4)
