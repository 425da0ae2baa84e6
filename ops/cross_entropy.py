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

`token_cross_entropy` and `linear_cross_entropy` do these steps as one differentiable function, and
`cross_entropy` does them on one rank. No step makes an fp32 copy of the logits.

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
from .matmul import addmm, autocast_arguments, matmul
from .registration import LIBRARY, Op, compute_dtype, empty_placeholder, runs_compiled, same_dtype

IGNORE_INDEX = -100

# The most logits that the reference widens at once: 8 MiB in fp32.
CHUNK_ELEMENTS = 1 << 21

# If `linear_cross_entropy` has more than MAX_WHOLE_LOGITS logits, only CHUNK_LOGITS exist at a
# time. The backward pass may have to compute them again, which is a fourth product besides three;
# fewer logits are therefore kept.
MAX_WHOLE_LOGITS = 10**9
CHUNK_LOGITS = 1 << 26

# Gathers the statistics of all ranks: [2 or 3, T] of this rank -> [ranks, 2 or 3, T].
Gather = Callable[[Tensor], Tensor]

# Starts the sum of a gradient over the ranks; the function that it returns finishes it.
SumGrad = Callable[[Tensor], Callable[[], Tensor]]


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


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    num_classes: int,
    ignore_index: int = IGNORE_INDEX,
    first: int = 0,
    gather: Gather | None = None,
    sum_grad: SumGrad | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Returns the differentiable losses [T] of the logits hidden @ weight.T + bias.

    Only this function holds the logits, so it writes their gradient over them. More than
    MAX_WHOLE_LOGITS logits never exist whole: they are computed in chunks of rows, over which the
    gradients of weight and bias are summed in fp32. A CPU computes these together with the losses.
    The backward pass computes the logits again if the losses turn out to have different gradients,
    and on an accelerator, where finding that out would wait for the device.

    Args:
        hidden: [T, H].
        weight: [Vp, H], this rank's rows.
        bias: [Vp] or None, this rank's rows.
        sum_grad: Starts the sum of the gradient of `hidden` over the ranks, which overlaps with the
            product for the weight's gradient.
        softcap: See `cap_logits`.
        target: As in `token_cross_entropy`.
        num_classes: As in `token_cross_entropy`.
        first: As in `token_cross_entropy`.
        gather: As in `token_cross_entropy`.
    """
    settings = LossSettings(num_classes, ignore_index, 0.0, 0.0, first, gather)
    return _LinearCrossEntropy.apply(
        *autocast_arguments(hidden, weight, bias), target, settings, sum_grad, softcap
    )


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Returns softcap * tanh(logits / softcap), or the logits themselves without a cap; Gemma 2 caps
    them at 30.
    """
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def suits_chunks(rows: int, columns: int) -> bool:
    """Returns whether `linear_cross_entropy` computes so many logits in chunks of rows."""
    return rows * columns > MAX_WHOLE_LOGITS


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
        losses, log_z, ctx.settings = _compute_losses(logits, target, settings)
        ctx.save_for_backward(logits, target, log_z)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        logits, target, log_z = ctx.saved_tensors
        logits_grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows in _split_for_kernel(logits):
            torch.ops.shardzoo.cross_entropy_grad_out(
                logits[rows],
                target[rows],
                grads[0][rows],
                log_z[rows],
                *ctx.settings,
                grad_logits=logits_grad[rows],
            )
        return logits_grad, None, None


def _compute_losses(
    logits: Tensor, target: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor, GradSettings]:
    """Computes the losses outside autograd; the ranks communicate once.

    Returns:
        The losses [T], the log of the sum of exp over the whole vocabulary [T], and what
        `cross_entropy_grad` needs besides tensors.
    """
    num_classes, ignore_index, smoothing, z_loss, first, gather = settings
    columns = settings.count_columns(logits.shape[1])
    stats = _compute_statistics(logits, target, first, columns, with_sum=smoothing != 0)
    stats = gather(stats) if gather else stats[None]  # [ranks, 2 or 3, T]

    log_z = stats[:, 0].logsumexp(0)  # [T]
    losses = log_z - (1 - smoothing) * stats[:, 1].sum(0)
    if smoothing:
        losses -= smoothing / num_classes * stats[:, 2].sum(0)
    if z_loss:
        losses += z_loss * log_z.square()
    losses = losses.masked_fill_(target == ignore_index, 0)

    grad_settings = GradSettings(first, columns, num_classes, smoothing, z_loss, ignore_index)
    return losses, log_z, grad_settings


def _compute_statistics(
    logits: Tensor, target: Tensor, first: int, columns: int, *, with_sum: bool
) -> Tensor:
    """Returns [2 or 3, T] of this rank's columns: the log of the sum of exp, the target's logit
    and, with `with_sum`, the sum of the logits.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    stats = logits.new_empty(2 + with_sum, len(logits), dtype=dtype)
    for rows in _split_for_kernel(logits):
        maximum, sum_exp, target_logit, sum_logits = torch.ops.shardzoo.cross_entropy_stats(
            logits[rows], target[rows], first, columns, with_sum
        )
        stats[0, rows] = maximum + sum_exp.log()
        stats[1, rows] = target_logit
        if with_sum:
            stats[2, rows] = sum_logits
    return stats


def _overwrite_with_grad(
    logits: Tensor,
    target: Tensor,
    grad: Tensor,
    log_z: Tensor,
    settings: GradSettings,
    softcap: float | None,
) -> None:
    """Writes the gradient of the logits [T, Vp], before they were capped, over them."""
    if softcap is None:
        parts = _split_for_kernel(logits)
    else:
        parts = _split_rows(len(logits), logits.shape[1], CHUNK_ELEMENTS)
    for rows in parts:
        slope = None if softcap is None else 1 - (logits[rows] / softcap).square()
        torch.ops.shardzoo.cross_entropy_grad_(
            logits[rows], target[rows], grad[rows], log_z[rows], *settings
        )
        if slope is not None:
            logits[rows] *= slope


def _split_for_kernel(logits: Tensor) -> Iterator[slice]:
    """Returns the rows of each call of an operator: all of them for a compiled kernel, else few,
    because the reference widens them.
    """
    rows, width = logits.shape
    return _split_rows(rows, width, rows * width if runs_compiled(logits) else CHUNK_ELEMENTS)


def _split_rows(rows: int, width: int, elements: int) -> Iterator[slice]:
    """Returns slices of the rows, with at most `elements` elements each, but at least one row."""
    step = max(1, elements // max(width, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


# The losses of a linear layer.


class _LinearCrossEntropy(Function):
    """Implements `linear_cross_entropy`."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        settings: LossSettings,
        sum_grad: SumGrad | None,
        softcap: float | None,
    ) -> Tensor:
        ctx.softcap = softcap
        if suits_chunks(len(hidden), len(weight)):
            logits = None
            losses, log_z = _compute_chunked_losses(ctx, hidden, weight, bias, target, settings)
        else:
            logits = cap_logits(addmm(bias, hidden, weight.t()), softcap)  # [T, Vp]
            losses, log_z, ctx.settings = _compute_losses(logits, target, settings)
        ctx.save_for_backward(hidden, weight, bias, logits, target, log_z)
        ctx.sum_grad = sum_grad
        ctx.logits_overwritten = False
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        hidden, weight, bias, logits, target, log_z = ctx.saved_tensors
        if logits is None:
            return (
                *_compute_chunked_grads(ctx, grads[0], hidden, weight, bias, target, log_z),
                *(None,) * 4,
            )
        if ctx.logits_overwritten:
            # This is a second pass over a retained graph.
            logits = cap_logits(addmm(bias, hidden, weight.t()), ctx.softcap)
        # Writing to .data keeps the saved tensors valid for a second pass.
        logits_grad = logits.data
        ctx.logits_overwritten = True
        arguments = (target, grads[0], log_z, ctx.settings, ctx.softcap)
        _overwrite_with_grad(logits_grad, *arguments)

        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        input_grad = None
        finish_sum = None
        if needs_input:
            input_grad = matmul(logits_grad, weight)
            if ctx.sum_grad:
                finish_sum = ctx.sum_grad(input_grad)
        weight_grad = matmul(logits_grad.t(), hidden) if needs_weight else None
        bias_grad = logits_grad.sum(0) if needs_bias else None
        if finish_sum:
            input_grad = finish_sum()
        return input_grad, weight_grad, bias_grad, *(None,) * 4


def _compute_chunked_losses(
    ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Returns the losses and the logs of the sums, both [T]; the logits of a chunk of rows exist at
    a time.

    On a CPU it also computes the gradients of the losses' sum while the logits exist: in most steps
    the losses' own gradients are equal, and the backward pass only has to scale these.
    """
    ctx.sums = None
    if hidden.is_cpu and any(ctx.needs_input_grad):
        ctx.sums = _SummedGrads(ctx, hidden, weight, bias)
    all_losses = []
    all_log_z = []
    for part in _split_rows(len(hidden), len(weight), CHUNK_LOGITS):
        logits = cap_logits(addmm(bias, hidden[part], weight.t()), ctx.softcap)
        losses, log_z, ctx.settings = _compute_losses(logits, target[part], settings)
        if ctx.sums is not None:
            ctx.sums.add(part, logits, target[part], torch.ones_like(losses), log_z, ctx.settings)
        all_losses.append(losses)
        all_log_z.append(log_z)
        # These logits must not exist beside those of the next chunk.
        del logits
    return torch.cat(all_losses), torch.cat(all_log_z)


def _compute_chunked_grads(
    ctx,
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    log_z: Tensor,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of hidden, weight and bias; the logits of a chunk of rows exist at a
    time.
    """
    sums = ctx.sums
    ctx.sums = None
    if sums is not None:
        # The forward pass took all gradients to be 1. If those of the tokens that count are equal,
        # its sums need only this factor.
        counted = grad[target != ctx.settings.ignore_index]
        if len(counted) and bool((counted == counted[0]).all()):
            return sums.finish(ctx, counted[0])
        del sums
    sums = _SummedGrads(ctx, hidden, weight, bias)
    for part in _split_rows(len(hidden), len(weight), CHUNK_LOGITS):
        logits = cap_logits(addmm(bias, hidden[part], weight.t()), ctx.softcap)
        sums.add(part, logits, target[part], grad[part], log_z[part], ctx.settings)
        # These logits must not exist beside those of the next chunk.
        del logits
    return sums.finish(ctx)


class _SummedGrads:
    """Sums the gradients of hidden, weight and bias over chunks of rows, those of weight and bias
    in fp32.
    """

    def __init__(self, ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._hidden = hidden
        self._softcap = ctx.softcap
        self._weight = weight
        self.input = empty_pooled(hidden) if needs_input else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        self.bias = torch.zeros_like(bias, dtype=wide) if needs_bias and bias is not None else None

    def add(
        self,
        part: slice,
        logits: Tensor,
        target: Tensor,
        grad: Tensor,
        log_z: Tensor,
        settings: GradSettings,
    ) -> None:
        """Adds those of the rows `part`, given the gradients of their losses.

        Overwrites the logits.
        """
        _overwrite_with_grad(logits, target, grad, log_z, settings, self._softcap)
        if self.input is not None:
            self.input[part] = matmul(logits, self._weight)
        if self.weight is not None and self.weight.dtype == logits.dtype:
            self.weight.addmm_(logits.t(), self._hidden[part])
        elif self.weight is not None:
            self.weight += matmul(logits.t(), self._hidden[part])
        if self.bias is not None:
            self.bias += logits.sum(0, dtype=self.bias.dtype)

    def finish(self, ctx, factor: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Returns the gradients times `factor`, that of hidden summed over the ranks.

        The sums are scaled in place, and not used again.
        """
        grads = (self.input, self.weight, self.bias)
        if factor is not None:
            grads = tuple(None if x is None else x.mul_(factor) for x in grads)
        input_grad, *parameter_grads = grads
        if input_grad is not None and ctx.sum_grad:
            input_grad = ctx.sum_grad(input_grad)()
        dtype = self._weight.dtype
        return input_grad, *(None if x is None else x.to(dtype) for x in parameter_grads)


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
