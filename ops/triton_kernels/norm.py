"""LayerNorm, RMSNorm and their gradients in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import choose_block, choose_warps, chunk_rows, partial_sums, pointer


@triton.jit
def norm_forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    summed_ptr,
    mean_ptr,
    rstd_ptr,
    columns,
    eps: tl.float32,
    offset: tl.float32,
    CENTERED: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row * columns + column
    h = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        h = h.to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + at, h, mask=inside)
        h = h.to(tl.float32)
    if CENTERED:
        mean = tl.sum(h, axis=0) / columns
        h = tl.where(inside, h - mean, 0.0)
        tl.store(mean_ptr + row, mean)
    rstd = 1.0 / tl.sqrt(tl.sum(h * h, axis=0) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    normalized = h * rstd
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ROUNDS_ONCE:
        weight += offset
    else:
        normalized = normalized.to(y_ptr.dtype.element_ty).to(tl.float32)
    y = normalized * weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    grad_ptr,
    grad_summed_ptr,
    h_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_x_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    rows,
    columns,
    chunk,
    offset: tl.float32,
    CENTERED: tl.constexpr,
    HAS_SUMMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * chunk
    column = tl.arange(0, BLOCK)
    inside = column < columns
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset
    sum_weight = tl.zeros([BLOCK], dtype=tl.float32)
    sum_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(first, tl.minimum(first + chunk, rows)):
        at = row * columns + column
        dy = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        normalized = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if CENTERED:
            normalized -= tl.load(mean_ptr + row)
        normalized = normalized * rstd
        sum_weight += dy * normalized
        sum_bias += dy
        weighted = dy * weight
        grad_x = weighted - normalized * (tl.sum(weighted * normalized, axis=0) / columns)
        if CENTERED:
            grad_x -= tl.sum(weighted, axis=0) / columns
        grad_x = grad_x * rstd
        if HAS_SUMMED:
            grad_x += tl.load(grad_summed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    at = tl.program_id(0).to(tl.int64) * columns + column
    tl.store(partial_weight_ptr + at, sum_weight, mask=inside)
    if HAS_BIAS:
        tl.store(partial_bias_ptr + at, sum_bias, mask=inside)


def launch_layer_norm(x, residual, weight, bias, eps, y, summed, mean, rstd):
    _launch_forward(x, residual, weight, bias, eps, 0.0, True, y, summed, mean, rstd)


def _launch_forward(x, residual, weight, bias, eps, offset, rounds_once, y, summed, mean, rstd):
    columns = x.shape[-1]
    block = choose_block(columns)
    norm_forward[(x.numel() // columns,)](
        x,
        pointer(residual, x),
        weight,
        pointer(bias, x),
        y,
        summed,
        pointer(mean, rstd),
        rstd,
        columns,
        eps,
        offset,
        CENTERED=mean is not None,
        ROUNDS_ONCE=rounds_once,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=choose_warps(block),
    )


def launch_layer_norm_backward(
    grad, grad_summed, h, weight, mean, rstd, has_bias, grad_x, grad_weight, grad_bias
):
    outputs = (grad_x, grad_weight, grad_bias)
    _launch_backward(grad, grad_summed, h, weight, mean, rstd, has_bias, 0.0, *outputs)


def _launch_backward(
    grad, grad_summed, h, weight, mean, rstd, has_bias, offset, grad_x, grad_weight, grad_bias
):
    columns = h.shape[-1]
    rows = h.numel() // columns
    block = choose_block(columns)
    partial_weight = partial_sums(h, rows, columns)
    partial_bias = partial_sums(h, rows, columns) if has_bias else partial_weight
    norm_backward[(len(partial_weight),)](
        grad,
        pointer(grad_summed, grad),
        h,
        weight,
        pointer(mean, rstd),
        rstd,
        grad_x,
        partial_weight,
        partial_bias,
        rows,
        columns,
        chunk_rows(rows),
        offset,
        CENTERED=mean is not None,
        HAS_SUMMED=grad_summed is not None,
        HAS_BIAS=has_bias,
        BLOCK=block,
        num_warps=choose_warps(block),
    )
    grad_weight.copy_(partial_weight.sum(0))
    if has_bias:
        grad_bias.copy_(partial_bias.sum(0))


def launch_rms_norm(x, residual, weight, eps, y, summed, rstd):
    _launch_forward(x, residual, weight, None, eps, 0.0, False, y, summed, None, rstd)


def launch_rms_norm_backward(grad, grad_summed, h, weight, rstd, grad_x, grad_weight):
    outputs = (grad_x, grad_weight, None)
    _launch_backward(grad, grad_summed, h, weight, None, rstd, False, 0.0, *outputs)


def launch_offset_rms_norm(x, residual, weight, eps, offset, y, summed, rstd):
    _launch_forward(x, residual, weight, None, eps, offset, True, y, summed, None, rstd)


def launch_offset_rms_norm_backward(
    grad, grad_summed, h, weight, rstd, offset, grad_x, grad_weight
):
    outputs = (grad_x, grad_weight, None)
    _launch_backward(grad, grad_summed, h, weight, None, rstd, False, offset, *outputs)
