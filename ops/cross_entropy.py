"""Computes the cross-entropy over a vocabulary that may be split over ranks.

For one token with logits x over V classes, target t, lse = log sum exp x, smoothing a and z-loss
weight z:

    loss = (1 - a) (lse - x_t) + a (lse - mean x) + z lse^2

A rank holds the columns [first, first + columns) of the vocabulary, padded to the width of its
logits.

1. Each rank computes `cross_entropy_stats`.
2. The ranks combine the statistics: maximum by MAX; target_logit, sum_logits, and sum_exp rescaled
   to the common maximum, by SUM.
3. `cross_entropy_loss` computes the losses, and `cross_entropy_grad` the gradient of the local
   logits.

`token_cross_entropy` does these steps as one differentiable function, and `cross_entropy` does them
on one rank; linear_cross_entropy.py does them from the hidden states on. No step makes an fp32 copy
of the logits.

Label smoothing: Szegedy et al. 2016; z-loss: Chowdhery et al. 2022 (PaLM).

Shapes: T tokens, V classes of the whole vocabulary, Vp columns of a rank with its padding, H the
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import Function, once_differentiable
from .cpu.pool import empty_pooled
from .registration import LIBRARY, Op, compute_dtype, empty_placeholder, runs_compiled, same_dtype

IGNORE_INDEX = -100

# The most logits that the reference widens at once: 8 MiB in fp32.
CHUNK_ELEMENTS = 1 << 21

# Gathers the statistics of all ranks: [2 or 3, T] of this rank -> [ranks, 2 or 3, T].
Gather = Callable[[Tensor], Tensor]


# The steps, between which the caller lets the ranks communicate.


def cross_entropy_stats(
    logits: Tensor, target: Tensor, first: int, columns: int, *, with_sum: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the statistics of a rank's logits, in one pass over them. Not differentiable.

    Args:
        logits: [T, Vp], the columns [first, first + columns) of the vocabulary, then padding.
        target: int64 [T], class numbers in the whole vocabulary.
        first: The rank's first column.
        columns: The number of the rank's columns; 0 on a rank that holds only padding.
        with_sum: Whether to compute sum_logits, which label smoothing needs; otherwise it has size
            0.

    Returns:
        maximum, sum_exp (of exp(x - maximum)), target_logit (0 if another rank has the target),
        sum_logits: each [T], fp32 (fp64 for fp64 logits). A row that is -inf everywhere has maximum
        -inf and sum_exp 0.
    """
    _check(logits, target)
    _check_columns(logits, columns)
    return stats_op(logits, target, first, columns, with_sum)


def cross_entropy_loss(
    log_z: Tensor,
    target_logit: Tensor,
    sum_logits: Tensor,
    target: Tensor,
    *,
    num_classes: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Returns the losses [T] from the combined statistics of the ranks; 0 where the target is
    `ignore_index`.

    Args:
        log_z: [T], the log of the sum of exp over the whole vocabulary.
        target_logit: [T], the sum over the ranks.
        sum_logits: [T], the sum over the ranks; read only with label smoothing.
        target: int64 [T], class numbers in the whole vocabulary.
        num_classes: The unpadded size of the whole vocabulary.
    """
    loss = log_z - target_logit
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (log_z - sum_logits / num_classes)
    if z_loss:
        loss = loss + z_loss * log_z.square()
    return torch.where(target == ignore_index, 0.0, loss)


def cross_entropy_grad(
    logits: Tensor,
    target: Tensor,
    grad: Tensor,
    log_z: Tensor,
    *,
    first: int,
    columns: int,
    num_classes: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = IGNORE_INDEX,
    in_place: bool = False,
) -> Tensor:
    """Returns the gradient of a rank's logits [T, Vp], in their dtype.

    Args:
        logits: As in `cross_entropy_stats`.
        target: As in `cross_entropy_stats`.
        first: As in `cross_entropy_stats`.
        columns: As in `cross_entropy_stats`.
        grad: [T], the gradient of each token's loss.
        log_z: [T], the log of the sum of exp over the whole vocabulary.
        num_classes: The unpadded size of the whole vocabulary.
        in_place: Overwrite the logits and return them. Use it only if nothing else needs their
            values.
    """
    _check(logits, target)
    _check_columns(logits, columns)
    settings = (first, columns, num_classes, float(label_smoothing), float(z_loss), ignore_index)
    if in_place:
        torch.ops.shardzoo.cross_entropy_grad_(logits, target, grad, log_z, *settings)
        return logits
    return grad_op(logits, target, grad, log_z, *settings)


# The steps as one differentiable function.


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Returns the differentiable losses [T] of whole logits [T, V] and target int64 [T], in fp32
    (fp64 for fp64).
    """
    _check(logits, target)
    return torch.ops.shardzoo.cross_entropy(
        logits, target, float(label_smoothing), float(z_loss), ignore_index
    )[0]


def token_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    num_classes: int,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    first: int = 0,
    gather: Gather | None = None,
) -> Tensor:
    """Returns the losses [T], the same on every rank; they can be differentiated only once.

    The reference processes rows in chunks, so no fp32 copy of the logits exists.

    Args:
        logits: [T, Vp], the columns of the vocabulary that begin at `first`, then padding.
        target: int64 [T], class numbers in the whole vocabulary.
        num_classes: The unpadded size of the whole vocabulary.
        gather: Gathers the statistics of all ranks; None if this rank has the whole vocabulary.
    """
    settings = LossSettings(num_classes, ignore_index, label_smoothing, z_loss, first, gather)
    return _TokenCrossEntropy.apply(logits, target, settings)


def _check(logits: Tensor, target: Tensor) -> None:
    if logits.dim() != 2 or tuple(target.shape) != (logits.shape[0],):
        raise ValueError(
            f"expected logits [T, V] and target [T], got {tuple(logits.shape)} and {tuple(target.shape)}"
        )


def _check_columns(logits: Tensor, columns: int) -> None:
    if not 0 <= columns <= logits.shape[1]:
        raise ValueError(f"columns must be in 0..{logits.shape[1]}, got {columns}")


# The losses of a rank's logits.


class LossSettings(NamedTuple):
    """Holds what a loss needs besides tensors; the fields are arguments of `token_cross_entropy`."""

    num_classes: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    first: int
    gather: Gather | None

    def count_columns(self, width: int) -> int:
        """Returns how many of the `width` columns of a rank's logits are not padding."""
        return min(max(self.num_classes - self.first, 0), width)

    def for_gradient(self, width: int) -> GradSettings:
        """Returns what `cross_entropy_grad` needs besides tensors for `width` columns of logits."""
        return GradSettings(
            self.first,
            self.count_columns(width),
            self.num_classes,
            self.label_smoothing,
            self.z_loss,
            self.ignore_index,
        )


class GradSettings(NamedTuple):
    """Holds the arguments of `cross_entropy_grad` besides tensors, in the order of the schema."""

    first: int
    columns: int
    num_classes: int
    label_smoothing: float
    z_loss: float
    ignore_index: int


class _TokenCrossEntropy(Function):
    """Implements `token_cross_entropy`."""

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, settings: LossSettings) -> Tensor:
        losses, log_z, ctx.settings = compute_losses(logits, target, settings)
        ctx.save_for_backward(logits, target, log_z)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        logits, target, log_z = ctx.saved_tensors
        logits_grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows in split_for_kernel(logits):
            torch.ops.shardzoo.cross_entropy_grad_out(
                logits[rows],
                target[rows],
                grads[0][rows],
                log_z[rows],
                *ctx.settings,
                grad_logits=logits_grad[rows],
            )
        return logits_grad, None, None


def compute_losses(
    logits: Tensor, target: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor, GradSettings]:
    """Computes the losses outside autograd; the ranks communicate once.

    Returns:
        The losses [T], the log of the sum of exp over the whole vocabulary [T], and what
        `cross_entropy_grad` needs besides tensors.
    """
    stats = compute_statistics(logits, target, settings)
    losses, log_z = combine_statistics(stats, target, settings)
    return losses, log_z, settings.for_gradient(logits.shape[1])


def combine_statistics(
    stats: Tensor, target: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Returns the losses and the logs of the sums of exp over the whole vocabulary, both [T].

    Args:
        stats: [2 or 3, T], of this rank's columns; see `compute_statistics`.
    """
    smoothing = settings.label_smoothing
    stats = settings.gather(stats) if settings.gather else stats[None]  # [ranks, 2 or 3, T]
    log_z = stats[:, 0].logsumexp(0)  # [T]
    losses = log_z - (1 - smoothing) * stats[:, 1].sum(0)
    if smoothing:
        losses -= smoothing / settings.num_classes * stats[:, 2].sum(0)
    if settings.z_loss:
        losses += settings.z_loss * log_z.square()
    return losses.masked_fill_(target == settings.ignore_index, 0), log_z


def compute_statistics(logits: Tensor, target: Tensor, settings: LossSettings) -> Tensor:
    """Returns [2 or 3, T] of the columns from `settings.first` on: the log of the sum of exp, the
    target's logit and, for label smoothing, the sum of the logits.
    """
    with_sum = settings.label_smoothing != 0
    columns = settings.count_columns(logits.shape[1])
    dtype = torch.promote_types(logits.dtype, torch.float32)
    stats = logits.new_empty(2 + with_sum, len(logits), dtype=dtype)
    for rows in split_for_kernel(logits):
        maximum, sum_exp, target_logit, sum_logits = torch.ops.shardzoo.cross_entropy_stats(
            logits[rows], target[rows], settings.first, columns, with_sum
        )
        stats[0, rows] = maximum + sum_exp.log()
        stats[1, rows] = target_logit
        if with_sum:
            stats[2, rows] = sum_logits
    return stats


def overwrite_with_grad(
    logits: Tensor,
    target: Tensor,
    grad: Tensor,
    log_z: Tensor,
    settings: GradSettings,
    softcap: float | None,
) -> None:
    """Writes the gradient of the logits [T, Vp], before they were capped, over them."""
    if softcap is None:
        parts = split_for_kernel(logits)
    else:
        parts = split_rows(len(logits), logits.shape[1], CHUNK_ELEMENTS)
    for rows in parts:
        slope = None if softcap is None else 1 - (logits[rows] / softcap).square()
        torch.ops.shardzoo.cross_entropy_grad_(
            logits[rows], target[rows], grad[rows], log_z[rows], *settings
        )
        if slope is not None:
            logits[rows] *= slope


def split_for_kernel(logits: Tensor) -> Iterator[slice]:
    """Returns the rows of each call of an operator: all of them for a compiled kernel, else few,
    because the reference widens them.
    """
    rows, width = logits.shape
    return split_rows(rows, width, rows * width if runs_compiled(logits) else CHUNK_ELEMENTS)


def split_rows(rows: int, width: int, elements: int) -> Iterator[slice]:
    """Returns slices of the rows, with at most `elements` elements each, but at least one row."""
    step = max(1, elements // max(width, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


# The definitions, which the kernels are compared with.


def stats_reference(logits, target, first, columns, with_sum):
    """Computes the definition of `cross_entropy_stats`; sum_logits may be a tensor of size 0."""
    x = logits[:, :columns].to(compute_dtype(logits))
    if columns == 0:
        zero = torch.zeros_like(target, dtype=x.dtype)
        sum_logits = zero.clone() if with_sum else empty_placeholder(x)
        return zero - float("inf"), zero, zero.clone(), sum_logits
    maximum = x.amax(-1)
    # exp(-inf - -inf) would be NaN.
    shift = torch.where(maximum == float("-inf"), 0.0, maximum)
    sum_exp = torch.exp(x - shift[:, None]).sum(-1)
    is_here = (target >= first) & (target < first + columns)
    picked = x.gather(1, (target - first).clamp(0, columns - 1)[:, None])[:, 0]
    target_logit = torch.where(is_here, picked, 0.0)
    sum_logits = x.sum(-1) if with_sum else empty_placeholder(x)
    return maximum, sum_exp, target_logit, sum_logits


def grad_reference(
    logits, target, grad, log_z, first, columns, num_classes, label_smoothing, z_loss, ignore_index
):
    """Returns the gradient of the local logits [T, Vp]; 0 in padding columns and ignored rows.

    With p = exp(x - lse), it is p (1 + 2 z lse) - a / V, minus 1 - a at the target, times the
    gradient of the loss.
    """
    dtype = compute_dtype(logits)
    x = logits[:, :columns].to(dtype)
    scale = grad.to(dtype)[:, None]
    lse = log_z.to(dtype)[:, None]
    result = torch.exp(x - lse) * (1.0 + 2.0 * z_loss * lse) - label_smoothing / num_classes
    column = torch.arange(columns, device=logits.device) + first
    result = result - (1.0 - label_smoothing) * (column == target[:, None]).to(dtype)
    result = torch.where((target == ignore_index)[:, None], 0.0, result * scale)
    padding = logits.shape[1] - columns
    return (torch.nn.functional.pad(result, (0, padding)).to(logits.dtype),)


# The registration of the steps.


def _allocate_stats(logits, target, first, columns, with_sum):
    rows = logits.shape[0]
    sizes = (rows, rows, rows, rows if with_sum else 0)
    return tuple(logits.new_empty(size, dtype=compute_dtype(logits)) for size in sizes)


def _allocate_grad(logits, *_):
    return (empty_pooled(logits),)


def _prepare_stats(logits, target, first, columns, with_sum):
    _check_columns(logits, columns)
    return same_dtype(logits) or (
        logits.contiguous(),
        target.to(torch.int64).contiguous(),
        first,
        columns,
        with_sum,
    )


def _prepare_grad(logits, target, grad, log_z, *settings):
    _check_columns(logits, settings[1])
    wide = compute_dtype(logits)
    return same_dtype(logits) or (
        logits.contiguous(),
        target.to(torch.int64).contiguous(),
        grad.to(wide).contiguous(),
        log_z.to(wide).contiguous(),
        *settings,
    )


def _launch_triton_stats(*arguments):
    from .triton_kernels.cross_entropy import launch_stats

    launch_stats(*arguments)


def _launch_triton_grad(*arguments):
    from .triton_kernels.cross_entropy import launch_grad

    launch_grad(*arguments)


_SETTINGS = "SymInt first, SymInt columns, SymInt num_classes, float label_smoothing, float z_loss, int ignore_index"

stats_op = Op(
    "cross_entropy_stats",
    "Tensor logits, Tensor target, SymInt first, SymInt columns, bool with_sum",
    ("maximum", "sum_exp", "target_logit", "sum_logits"),
    allocate=_allocate_stats,
    reference=stats_reference,
    prepare=_prepare_stats,
    triton=_launch_triton_stats,
)

grad_op = Op(
    "cross_entropy_grad",
    f"Tensor logits, Tensor target, Tensor grad, Tensor log_z, {_SETTINGS}",
    ("grad_logits",),
    allocate=_allocate_grad,
    reference=grad_reference,
    prepare=_prepare_grad,
    triton=_launch_triton_grad,
)


def _grad_in_place(logits, *arguments):
    """Writes the gradient over the logits.

    This is an operator of its own, because an op's inputs and its `out` must not overlap.
    """
    if logits.is_contiguous() and grad_op.run_fast((logits, *arguments), (logits,)):
        return
    logits.copy_(grad_reference(logits, *arguments)[0])


LIBRARY.define(
    f"cross_entropy_grad_(Tensor(a!) logits, Tensor target, Tensor grad, Tensor log_z, {_SETTINGS}) -> ()"
)
LIBRARY.impl("cross_entropy_grad_", _grad_in_place, "CompositeExplicitAutograd")
torch.library.register_fake("shardzoo::cross_entropy_grad_", lambda *_: None, lib=LIBRARY)


# The registration of the whole differentiable loss on one rank.


def _loss(logits, target, label_smoothing, z_loss, ignore_index):
    columns = logits.shape[1]
    maximum, sum_exp, target_logit, sum_logits = stats_op(
        logits, target, 0, columns, label_smoothing != 0
    )
    log_z = maximum + torch.log(sum_exp)
    losses = cross_entropy_loss(
        log_z,
        target_logit,
        sum_logits,
        target,
        num_classes=columns,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
    )
    return losses, log_z


def _allocate_loss(logits, *_):
    losses, log_z, *_ = _allocate_stats(logits, None, 0, 0, False)
    return losses, log_z


def _setup_context(ctx, inputs, output):
    logits, target, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, target, output[1])


def _backward(ctx, grad_losses, grad_log_z):
    logits, target, log_z = ctx.saved_tensors
    columns = logits.shape[1]
    grad = grad_op(logits, target, grad_losses, log_z, 0, columns, columns, *ctx.settings)
    return grad, None, None, None, None


LIBRARY.define(
    "cross_entropy(Tensor logits, Tensor target, float label_smoothing, float z_loss, int ignore_index) "
    "-> (Tensor losses, Tensor log_z)"
)
LIBRARY.impl("cross_entropy", _loss, "CompositeExplicitAutograd")
torch.library.register_fake("shardzoo::cross_entropy", _allocate_loss, lib=LIBRARY)
torch.library.register_autograd(
    "shardzoo::cross_entropy", _backward, setup_context=_setup_context, lib=LIBRARY
)
