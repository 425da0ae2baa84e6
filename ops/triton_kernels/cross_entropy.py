"""Cross-entropy over a vocabulary shard in Triton: each program processes a row block by block."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import choose_block, choose_warps

LARGEST_BLOCK = 4096


@triton.jit
def stats(
    logits_ptr,
    target_ptr,
    maximum_ptr,
    sum_exp_ptr,
    target_logit_ptr,
    sum_logits_ptr,
    row_stride,
    first,
    columns,
    WITH_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * row_stride
    tops = tl.full(
        [BLOCK], float("-inf"), dtype=tl.float32
    )  # every lane has its own maximum and sum
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    totals = tl.zeros([BLOCK], dtype=tl.float32)
    for offset in range(0, columns, BLOCK):
        column = offset + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
        if WITH_SUM:
            totals += x
        x = tl.where(inside, x, float("-inf"))
        larger = tl.where(x > tops, x, tops)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        rescale = tl.where(tops == float("-inf"), 1.0, tl.exp(tops - shift))
        sums = sums * rescale + tl.exp(x - shift)
        tops = larger
    top = tl.max(tops, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    rescale = tl.where(tops == float("-inf"), 1.0, tl.exp(tops - shift))
    column = tl.load(target_ptr + row) - first
    here = (column >= 0) & (column < columns)
    tl.store(maximum_ptr + row, top)
    tl.store(sum_exp_ptr + row, tl.sum(sums * rescale, axis=0))
    if WITH_SUM:
        tl.store(sum_logits_ptr + row, tl.sum(totals, axis=0))
    picked = tl.load(start + tl.where(here, column, 0)).to(tl.float32)
    tl.store(target_logit_ptr + row, tl.where(here, picked, 0.0))


@triton.jit
def gradient(
    logits_ptr,
    target_ptr,
    grad_ptr,
    log_z_ptr,
    grad_logits_ptr,
    row_stride,
    first,
    columns,
    ignore_index,
    uniform: tl.float32,  # label smoothing / number of classes
    target_share: tl.float32,  # 1 - label smoothing
    twice_z_loss: tl.float32,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    scale = tl.load(grad_ptr + row)
    log_z = tl.load(log_z_ptr + row)
    slope = scale * (1.0 + twice_z_loss * log_z)
    for offset in range(0, row_stride, BLOCK):
        column = offset + tl.arange(0, BLOCK)
        valid = column < tl.where(target == ignore_index, 0, columns)
        at = row * row_stride + column
        x = tl.load(logits_ptr + at, mask=valid, other=0.0).to(tl.float32)
        grad = tl.exp(x - log_z) * slope - uniform * scale
        grad -= tl.where(column == target - first, target_share * scale, 0.0)
        grad = tl.where(valid, grad, 0.0)
        tl.store(
            grad_logits_ptr + at,
            grad.to(grad_logits_ptr.dtype.element_ty),
            mask=column < row_stride,
        )


def launch_stats(
    logits, target, first, columns, with_sum, maximum, sum_exp, target_logit, sum_logits
):
    rows, width = logits.shape
    block = min(choose_block(width), LARGEST_BLOCK)
    outputs = (maximum, sum_exp, target_logit, sum_logits)
    stats[(rows,)](
        logits,
        target,
        *outputs,
        width,
        first,
        columns,
        WITH_SUM=with_sum,
        BLOCK=block,
        num_warps=choose_warps(block),
    )


def launch_grad(
    logits,
    target,
    grad,
    log_z,
    first,
    columns,
    num_classes,
    label_smoothing,
    z_loss,
    ignore_index,
    grad_logits,
):
    rows, width = logits.shape
    block = min(choose_block(width), LARGEST_BLOCK)
    gradient[(rows,)](
        logits,
        target,
        grad,
        log_z,
        grad_logits,
        width,
        first,
        columns,
        ignore_index,
        label_smoothing / num_classes,
        1.0 - label_smoothing,
        2.0 * z_loss,
        BLOCK=block,
        num_warps=choose_warps(block),
    )
