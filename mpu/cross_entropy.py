"""Cross-entropy of logits that are split along the vocabulary, without gathering them.

Each rank reduces its columns to two or three numbers per token; those are gathered ([T, 3] in fp32), and the loss of
every token follows:  loss = lse - (1 - ε) x_target - ε mean(x) + z lse²,  lse = log Σ exp(x). ε is label smoothing as
in `torch.nn.functional.cross_entropy`, z the coefficient of the z-loss of PaLM (arXiv:2204.02311, section 5). Rows
are processed in chunks, so no fp32 copy of the logits ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..ops import addmm, matmul
from .collectives import start_all_gather, start_all_reduce
from .layers import autocast, check_ids
from .mesh import ParallelMesh

CHUNK_ELEMENTS = 1 << 21  # of the widened logits: 8 MiB in fp32


def _chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(width, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


def token_losses(
    logits: Tensor, target: Tensor, classes: int, ignored: int, smoothing: float, z_loss: float, mesh
) -> tuple[Tensor, Tensor, tuple]:
    """Outside autograd: the losses [T] of logits [T, Vp], log Σ exp [T], and what `logits_grad` wants as settings."""
    first = 0 if mesh is None else mesh.tp_rank * logits.shape[1]
    columns = min(max(classes - first, 0), logits.shape[1])  # those that are not padding
    stats = logits.new_empty(3, len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    for rows in _chunks(*logits.shape):
        maximum, sum_exp, picked, total = torch.ops.shardzoo.cross_entropy_stats(
            logits[rows], target[rows], first, columns
        )
        stats[0, rows] = maximum + sum_exp.log()
        stats[1, rows], stats[2, rows] = picked, total
    stats = stats if smoothing else stats[:2]
    stats = stats[None] if mesh is None else start_all_gather(stats[None], 0, mesh.tp_group)()  # [tp, 3, T]
    lse = stats[:, 0].logsumexp(0)  # [T]
    losses = lse - (1 - smoothing) * stats[:, 1].sum(0)
    if smoothing:
        losses -= smoothing / classes * stats[:, 2].sum(0)
    if z_loss:
        losses += z_loss * lse.square()
    return losses.masked_fill_(target == ignored, 0), lse, (first, columns, classes, smoothing, z_loss, ignored)


class _TokenLosses(Function):
    """logits [T, Vp], target [T], classes, ignored label, smoothing, z, mesh -> losses [T]"""

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, *arguments) -> Tensor:
        losses, lse, ctx.settings = token_losses(logits, target, *arguments)
        ctx.save_for_backward(logits, target, lse)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        logits, target, lse = ctx.saved_tensors
        logits_grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows in _chunks(*logits.shape):
            torch.ops.shardzoo.cross_entropy_grad_out(
                logits[rows], target[rows], grads[0][rows], lse[rows], *ctx.settings, grad_logits=logits_grad[rows]
            )
        return logits_grad, None, None, None, None, None, None


class _HeadLosses(Function):
    """hidden [T, H], weight [Vp, H], bias [Vp] or None, group that the gradient of hidden is summed over or None, and
    the other arguments of `token_losses` -> losses [T]

    The logits are nobody else's, so their gradient is written over them.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None, target: Tensor, *rest
    ) -> Tensor:
        logits = addmm(bias, hidden, weight.t())  # [T, Vp]
        losses, lse, ctx.settings = token_losses(logits, target, *rest)
        ctx.save_for_backward(hidden, weight, bias, logits, target, lse)
        ctx.group, ctx.spent = group, False
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        hidden, weight, bias, logits, target, lse = ctx.saved_tensors
        if ctx.spent:  # a second pass over a retained graph
            logits = addmm(bias, hidden, weight.t())
        grad, ctx.spent = logits.data, True  # .data: writing there leaves what is saved valid for that second pass
        for rows in _chunks(*grad.shape):
            torch.ops.shardzoo.cross_entropy_grad_(grad[rows], target[rows], grads[0][rows], lse[rows], *ctx.settings)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        input_grad = reduction = None
        if needs_input:
            input_grad = matmul(grad, weight)
            reduction = start_all_reduce(input_grad, ctx.group) if ctx.group else None
        weight_grad = matmul(grad.t(), hidden) if needs_weight else None
        bias_grad = grad.sum(0) if needs_bias else None
        return reduction() if reduction else input_grad, weight_grad, bias_grad, *[None] * 7


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    num_classes: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    mesh: ParallelMesh | None = None,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` over a vocabulary that is split over the tensor-parallel ranks.

    logits: [..., Vp], this rank's columns; labels: [...] integers, the same on every rank.
    num_classes: the true vocabulary; columns from there on are padding and never enter the softmax. Default: all tp *
    Vp columns. label_smoothing and z_loss: see the module's text. Returns fp32 (fp64 for fp64 logits), the same on
    every rank: the mean over the labels that are not ignored (NaN if there is none, as torch does), their sum, or one
    loss per label. The gradient has the logits' dtype. Raises `ValueError` for shapes that do not match, more classes
    than columns, and labels outside [0, num_classes).
    """
    columns = logits.shape[-1] * (1 if mesh is None else mesh.tp_size)
    classes = columns if num_classes is None else num_classes
    if not 0 < classes <= columns:
        raise ValueError(f"num_classes {classes} must be between 1 and the {columns} columns of all ranks")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} do not match logits {tuple(logits.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r} must be 'mean', 'sum' or 'none'")
    target = labels.reshape(-1)
    kept = target != ignore_index
    check_ids(target.masked_fill(~kept, 0), classes, "label")
    flat = logits.reshape(-1, logits.shape[-1])
    losses = _TokenLosses.apply(flat, target, classes, ignore_index, label_smoothing, z_loss, mesh)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / kept.sum() if reduction == "mean" else losses.sum()


def head_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    num_classes: int,
    ignore_index: int = -100,
    partial_grad: bool = True,
    mesh: ParallelMesh | None = None,
) -> Tensor:
    """Losses [T] of the logits hidden · weightᵀ + bias, which only this function ever has.

    hidden: [T, H], replicated; weight, bias: this rank's [Vp, H] and [Vp]; target: int64 [T]; the rest as in
    `vocab_parallel_cross_entropy`. partial_grad: False where the caller sums the gradient of `hidden` over the ranks.
    """
    check_ids(target.masked_fill(target == ignore_index, 0), num_classes, "label")
    group = mesh.tp_group if mesh is not None and mesh.tp_size > 1 and partial_grad else None
    arguments = (group, target, num_classes, ignore_index, 0.0, 0.0, mesh)
    return _HeadLosses.apply(*autocast(hidden, weight, bias), *arguments)
