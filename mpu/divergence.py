"""Computes the Kullback-Leibler divergence of logits that are split along the vocabulary, without
gathering them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.autograd import Function, once_differentiable
from .mesh import ParallelMesh, tp_rank, tp_size

SMALLEST = -1e4  # of what an exponential is taken of, less the largest; also of padding
# Logits of so many elements are computed in fp32 at a time.
PIECE = 1 << 20


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
    of the student get gradients. The ranks exchange five numbers a token. For the backward pass
    only the logits of both are kept, in their own type.

    Args:
        logits: [..., Vp], this rank's columns.
        teacher_logits: [..., Vp], the same columns of the teacher.
        num_classes: The vocabulary size without padding; later columns are padding.
    """
    return _Divergence.apply(logits, teacher_logits.detach(), num_classes, temperature, mesh)


class _Divergence(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher_logits: Tensor,
        num_classes: int,
        temperature: float,
        mesh: ParallelMesh | None,
    ) -> Tensor:
        width = logits.shape[-1]
        kept = min(max(num_classes - tp_rank(mesh) * width, 0), width)
        both = (logits.flatten(0, -2), teacher_logits.flatten(0, -2))
        step = max(1, PIECE // width)
        starts = range(0, len(both[0]), step)

        def widen(first: int, number: int) -> Tensor:
            return _widen(both[number][first : first + step], kept, temperature)

        # The largest logit of each token, of both models: [T, 2].
        largest = [
            torch.stack([widen(first, number).amax(-1) for number in range(2)], -1)
            for first in starts
        ]
        maxima = _reduce(torch.cat(largest), dist.ReduceOp.MAX, mesh)
        # The sums of exp(s), of exp(t), and of exp(t) (t - s), of the student's s and the teacher's t.
        pieces: list[Tensor] = []
        for first in starts:
            own = maxima[first : first + step]
            student = (widen(first, 0) - own[:, :1]).clamp(min=SMALLEST)
            teacher = (widen(first, 1) - own[:, 1:]).clamp(min=SMALLEST)
            chances = teacher.exp()
            gaps = (chances * (teacher - student)).sum(-1)
            pieces.append(torch.stack([student.exp().sum(-1), chances.sum(-1), gaps], -1))
        sums = _reduce(torch.cat(pieces), dist.ReduceOp.SUM, mesh)
        ctx.save_for_backward(logits, teacher_logits, maxima, sums)
        ctx.settings = (kept, temperature, step)
        student_sum, teacher_sum, gap = sums.unbind(-1)
        divergence = gap / teacher_sum + student_sum.log() - teacher_sum.log()
        return divergence.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        """Returns (q - p) / T for the student's logits."""
        logits, teacher_logits, maxima, sums = ctx.saved_tensors
        kept, temperature, step = ctx.settings
        rows = logits.flatten(0, -2)
        teacher_rows = teacher_logits.flatten(0, -2)
        factors = grads[0].flatten() / temperature
        out = torch.zeros_like(rows)
        for first in range(0, len(rows), step):
            piece = slice(first, first + step)
            chances: list[Tensor] = []
            for number, each in enumerate((rows, teacher_rows)):
                wide = _widen(each[piece], kept, temperature) - maxima[piece, number, None]
                chances.append(wide.exp() / sums[piece, number, None])
            difference = (chances[0] - chances[1])[:, :kept]
            out[piece, :kept] = (factors[piece, None] * difference).to(out.dtype)
        return out.view_as(logits), None, None, None, None


def _widen(logits: Tensor, kept: int, temperature: float) -> Tensor:
    """Returns logits [T, Vp] in fp32 or wider, divided by the temperature.

    A rank that holds padding alone takes part with values that vanish in the softmax.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    wide[:, kept:] = -torch.inf
    return wide


def _reduce(values: Tensor, operation: Any, mesh: ParallelMesh | None) -> Tensor:
    """Reduces a tensor over the tensor-parallel ranks, in place."""
    if mesh is not None and tp_size(mesh) > 1:
        cast(Any, dist).all_reduce(values, operation, group=mesh.tp_group)
    return values
