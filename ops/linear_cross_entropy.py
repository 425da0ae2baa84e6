"""Computes the cross-entropy of a linear layer's outputs, whose logits need not exist whole.

The logits hidden @ weight.T + bias are T x Vp numbers. Only this function holds them, so it writes
their gradient over them. There are three ways:

- Whole: up to MAX_WHOLE_LOGITS logits are kept from the forward to the backward pass. The loss and
  its gradients take three products of 2 T Vp H operations.
- In chunks of rows, on a CPU: the forward pass computes the gradients of the losses' sum as well,
  while the logits of a chunk are in the caches, and sums the weight's in fp32. If the losses turn
  out to have different gradients, the backward pass computes the logits again: four products.
- In blocks of columns, on an accelerator, where finding that out would wait for the device: the
  forward pass reduces each block to statistics of its rows, and the backward pass computes the
  block again. What is summed over blocks is the gradient of hidden [T, H], in fp32; the weight's
  rows of a block are one product over all tokens, which needs no sum and no wider copy. The memory
  for the weight's gradient, which nobody needs before, keeps as many blocks of logits as fit into
  it: of T = 2 H tokens half, so that 3.5 products remain, and of T = H all but one or two.

Shapes: T tokens, Vp rows of a rank's part of the weight, H the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .autograd import Function, once_differentiable
from .cpu.pool import empty_pooled
from .cross_entropy import (
    IGNORE_INDEX,
    Gather,
    GradSettings,
    LossSettings,
    combine_statistics,
    compute_losses,
    compute_statistics,
    overwrite_with_grad,
    split_rows,
)
from .matmul import add_product, addmm, autocast_arguments, matmul

# More logits never exist whole.
MAX_WHOLE_LOGITS = 10**9
# The logits of a chunk of rows.
CHUNK_LOGITS = 1 << 26
# The logits of a block of columns, 64 MiB in 16 bits. A product over fewer columns than MIN_COLUMNS,
# or over a number that is no multiple of COLUMN_UNIT, leaves multiprocessors idle.
BLOCK_LOGITS = 1 << 25
MIN_COLUMNS = 1024
COLUMN_UNIT = 128
# Devices that compute the logits in chunks of rows.
ROW_CHUNK_DEVICES = ("cpu",)

# Elements to which the memory of kept logits is aligned, for loads of 16 bytes.
ALIGNED_ELEMENTS = 64

# Starts the sum of a gradient over the ranks; the function that it returns finishes it.
SumGrad = Callable[[Tensor], Callable[[], Tensor]]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    num_classes: int,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    first: int = 0,
    gather: Gather | None = None,
    sum_grad: SumGrad | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Returns the differentiable losses [T] of the logits hidden @ weight.T + bias.

    More than MAX_WHOLE_LOGITS logits never exist whole. All sums over parts of the logits are in
    fp32 (fp64 for fp64), and are rounded once.

    Args:
        hidden: [T, H].
        weight: [Vp, H], this rank's rows.
        bias: [Vp] or None, this rank's rows.
        target: As in `token_cross_entropy`, like the arguments that are not named here.
        sum_grad: Starts the sum of the gradient of `hidden` over the ranks, which overlaps with the
            product for the weight's gradient if the logits are whole.
        softcap: See `cap_logits`.
    """
    settings = LossSettings(num_classes, ignore_index, label_smoothing, z_loss, first, gather)
    return _LinearCrossEntropy.apply(
        *autocast_arguments(hidden, weight, bias), target, settings, sum_grad, softcap
    )


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Returns softcap * tanh(logits / softcap), or the logits themselves without a cap; Gemma 2 caps
    them at 30.
    """
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def suits_parts(rows: int, columns: int) -> bool:
    """Returns whether `linear_cross_entropy` computes so many logits in parts."""
    return rows * columns > MAX_WHOLE_LOGITS


def count_part_logits(rows: int, columns: int, device: str) -> int:
    """Returns how many logits exist at a time if they are computed in parts."""
    if device in ROW_CHUNK_DEVICES:
        return min(rows * columns, CHUNK_LOGITS)
    return rows * min(columns, choose_columns(rows))


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
        ctx.sum_grad = sum_grad
        ctx.loss_settings = settings
        ctx.settings = settings.for_gradient(len(weight))
        ctx.logits_overwritten = False
        ctx.parts = None
        logits = None
        if not suits_parts(len(hidden), len(weight)):
            logits = cap_logits(addmm(bias, hidden, weight.t()), softcap)  # [T, Vp]
            losses, log_z, _ = compute_losses(logits, target, settings)
        elif hidden.device.type in ROW_CHUNK_DEVICES:
            losses, log_z = _compute_losses_by_rows(ctx, hidden, weight, bias, target)
        else:
            losses, log_z = _compute_losses_by_columns(ctx, hidden, weight, bias, target)
        ctx.save_for_backward(hidden, weight, bias, logits, target, log_z)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        hidden, weight, bias, logits, target, log_z = ctx.saved_tensors
        if logits is None:
            by_rows = hidden.device.type in ROW_CHUNK_DEVICES
            compute_grads = _compute_grads_by_rows if by_rows else _compute_grads_by_columns
            computed = compute_grads(ctx, grads[0], hidden, weight, bias, target, log_z)
            return *computed, *(None,) * 4
        if ctx.logits_overwritten:
            # This is a second pass over a retained graph.
            logits = cap_logits(addmm(bias, hidden, weight.t()), ctx.softcap)
        # Writing to .data keeps the saved tensors valid for a second pass.
        logits_grad = logits.data
        ctx.logits_overwritten = True
        arguments = (target, grads[0], log_z, ctx.settings, ctx.softcap)
        overwrite_with_grad(logits_grad, *arguments)

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


# Chunks of rows.


def _compute_losses_by_rows(
    ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the losses and the logs of the sums, both [T]; the logits of a chunk of rows exist at
    a time.

    It also computes the gradients of the losses' sum while the logits exist: in most steps the
    losses' own gradients are equal, and the backward pass only has to scale these.
    """
    if any(ctx.needs_input_grad):
        ctx.parts = _SummedGrads(ctx, hidden, weight, bias)
    all_losses = []
    all_log_z = []
    for part in split_rows(len(hidden), len(weight), CHUNK_LOGITS):
        logits = cap_logits(addmm(bias, hidden[part], weight.t()), ctx.softcap)
        losses, log_z, _ = compute_losses(logits, target[part], ctx.loss_settings)
        if ctx.parts is not None:
            ctx.parts.add(part, logits, target[part], torch.ones_like(losses), log_z, ctx.settings)
        all_losses.append(losses)
        all_log_z.append(log_z)
        # These logits must not exist beside those of the next chunk.
        del logits
    return torch.cat(all_losses), torch.cat(all_log_z)


def _compute_grads_by_rows(
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
    sums = ctx.parts
    ctx.parts = None
    if sums is not None:
        # The forward pass took all gradients to be 1. If those of the tokens that count are equal,
        # its sums need only this factor.
        counted = grad[target != ctx.settings.ignore_index]
        if len(counted) and bool((counted == counted[0]).all()):
            return sums.finish(ctx, counted[0])
        del sums
    sums = _SummedGrads(ctx, hidden, weight, bias)
    for part in split_rows(len(hidden), len(weight), CHUNK_LOGITS):
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
        overwrite_with_grad(logits, target, grad, log_z, settings, self._softcap)
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


# Blocks of columns.


def choose_columns(rows: int) -> int:
    """Returns the number of columns in a block of logits."""
    columns = max(MIN_COLUMNS, BLOCK_LOGITS // max(rows, 1))
    return columns // COLUMN_UNIT * COLUMN_UNIT


class _ColumnBlocks:
    """Divides the logits of a call into blocks of columns, the first of which lie where the weight's
    gradient will be.

    The kept blocks end where that memory ends. The backward pass replaces them from the first on:
    the rows of the gradient that block k yields end before the logits of block k begin, so a
    product never writes what it reads, or what a later one reads.

    Attributes:
        blocks: The columns of each block.
        kept: How many of the blocks lie in `memory`.
        memory: [Vp, H], first logits and at last the weight's gradient; None if nothing needs it.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, *, keeps: bool) -> None:
        rows = len(hidden)
        columns, features = weight.shape
        width = choose_columns(rows)
        self.blocks = [
            slice(start, min(start + width, columns)) for start in range(0, columns, width)
        ]
        self.memory: Tensor | None = None
        self.kept = 0
        self._shape = (rows, width)
        if keeps:
            self.memory = torch.empty_like(weight, memory_format=torch.contiguous_format)
            self.kept = count_kept_blocks(rows, columns, features, width)
        self._start = find_kept_start(weight.numel(), self.kept * rows * width)

    def logits(self, number: int) -> Tensor | None:
        """Returns the memory [T, columns] of a kept block, None of another block."""
        if number >= self.kept or self.memory is None:
            return None
        rows, width = self._shape
        start = self._start + number * rows * width
        return self.memory.view(-1)[start : start + rows * width].view(rows, width)


def find_kept_start(elements: int, kept_elements: int) -> int:
    """Returns where the kept logits begin in memory of so many elements."""
    return (elements - kept_elements) // ALIGNED_ELEMENTS * ALIGNED_ELEMENTS


def count_kept_blocks(rows: int, columns: int, features: int, width: int) -> int:
    """Returns how many whole blocks of logits [rows, width] fit into memory [columns, features] in
    such a way that the gradients [width, features] of the blocks can replace them one by one.
    """
    logits = rows * width
    gradients = width * features
    elements = columns * features
    kept = min(elements // max(logits, 1), columns // width)
    while kept > 0:
        start = find_kept_start(elements, kept * logits)
        # Block k begins at start + k * logits, and its gradients end at (k + 1) * gradients. If the
        # first and the last block are not reached, those between them are not either.
        is_first_free = gradients <= start
        is_last_free = kept * gradients <= start + (kept - 1) * logits
        if is_first_free and is_last_free:
            break
        kept -= 1
    return kept


def _compute_losses_by_columns(
    ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the losses and the logs of the sums, both [T]. The ranks communicate once.

    Of the logits one block exists at a time, beside those that the backward pass will find in the
    memory of the weight's gradient.
    """
    parts = _ColumnBlocks(hidden, weight, keeps=ctx.needs_input_grad[1])
    stats = []
    for number, block in enumerate(parts.blocks):
        logits = _compute_block(ctx, hidden, weight, bias, block, parts.logits(number))
        settings = ctx.loss_settings._replace(first=ctx.loss_settings.first + block.start)
        stats.append(compute_statistics(logits, target, settings))
        # These logits must not exist beside those of the next block.
        del logits
    ctx.parts = parts
    of_blocks = torch.stack(stats)  # [blocks, 2 or 3, T]
    of_rank = torch.cat([of_blocks[:, 0].logsumexp(0)[None], of_blocks[:, 1:].sum(0)])
    return combine_statistics(of_rank, target, ctx.loss_settings)


def _compute_grads_by_columns(
    ctx,
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    log_z: Tensor,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of hidden, weight and bias."""
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    parts = ctx.parts
    ctx.parts = None
    if parts is None:
        # This is a second pass over a retained graph. The first one has returned the memory.
        parts = _ColumnBlocks(hidden, weight, keeps=needs_weight)
        parts.kept = 0
    input_sum: Tensor | None = None
    weight_grad = parts.memory if needs_weight else None
    bias_grad = torch.empty_like(bias) if needs_bias and bias is not None else None
    for number, block in enumerate(parts.blocks):
        logits = parts.logits(number)
        if logits is None:
            logits = _compute_block(ctx, hidden, weight, bias, block)
        settings = ctx.loss_settings._replace(first=ctx.loss_settings.first + block.start)
        of_block = settings.for_gradient(block.stop - block.start)
        overwrite_with_grad(logits, target, grad, log_z, of_block, ctx.softcap)
        if needs_input:
            input_sum = add_product(input_sum, logits, weight[block], wide)
        if bias_grad is not None:
            bias_grad[block] = logits.sum(0, dtype=wide)
        if weight_grad is not None:
            torch.mm(logits.t(), hidden, out=weight_grad[block])
        # These logits must not exist beside those of the next block.
        del logits
    input_grad = None if input_sum is None else input_sum.to(hidden.dtype)
    if input_grad is not None and ctx.sum_grad:
        input_grad = ctx.sum_grad(input_grad)()
    return input_grad, weight_grad, bias_grad


def _compute_block(
    ctx,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    block: slice,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the logits of a block of columns [T, columns], in `out` if it is given."""
    rows_t = weight[block].t()
    if bias is None:
        logits = torch.mm(hidden, rows_t, out=out)
    else:
        logits = torch.addmm(bias[block], hidden, rows_t, out=out)
    if ctx.softcap is not None:
        # As `cap_logits` does, in place.
        logits.div_(ctx.softcap).tanh_().mul_(ctx.softcap)
    return logits
