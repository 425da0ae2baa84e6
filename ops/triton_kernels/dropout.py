"""Bias, dropout and residual, and their gradients, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout_mask import dropout_threshold
from .common import (
    choose_block,
    choose_warps,
    chunk_rows,
    keep_factor,
    partial_sums,
    pointer,
    row_key,
)


@triton.jit
def key_of_row(sample_keys_ptr, row, rows_of_sample, first_row):
    """Returns the dropout key of a row, counted from the first one of the first sample."""
    key = tl.load(sample_keys_ptr + row // rows_of_sample)
    return row_key(key, first_row + row % rows_of_sample)


@triton.jit
def dropout_forward(
    x_ptr,
    bias_ptr,
    residual_ptr,
    sample_keys_ptr,
    y_ptr,
    columns,
    rows_of_sample,
    first_row,
    first_column,
    keep_scale: tl.float32,
    threshold,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row * columns + column
    value = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        key = key_of_row(sample_keys_ptr, row, rows_of_sample, first_row)
        keep = keep_factor(key, column + first_column, threshold, keep_scale)
        value = tl.where(keep == 0.0, 0.0, value * keep)
    if HAS_RESIDUAL:
        value += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dropout_backward(
    grad_ptr,
    sample_keys_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    columns,
    chunk,
    rows_of_sample,
    first_row,
    first_column,
    keep_scale: tl.float32,
    threshold,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * chunk
    column = tl.arange(0, BLOCK)
    inside = column < columns
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(first, tl.minimum(first + chunk, rows)):
        at = row * columns + column
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            key = key_of_row(sample_keys_ptr, row, rows_of_sample, first_row)
            keep = keep_factor(key, column + first_column, threshold, keep_scale)
            grad = tl.where(keep == 0.0, 0.0, grad * keep)
        sums += grad
        tl.store(grad_x_ptr + at, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
    if HAS_BIAS:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * columns + column, sums, mask=inside)


def launch_forward(x, bias, residual, keys, p, first_row, first_column, y):
    columns = x.shape[-1]
    rows = x.numel() // columns
    block = choose_block(columns)
    dropout_forward[(rows,)](
        x,
        pointer(bias, x),
        pointer(residual, x),
        keys if p else x,
        y,
        columns,
        rows // x.shape[0],
        first_row,
        first_column,
        1.0 / (1.0 - p),
        dropout_threshold(p),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        DROPOUT=p > 0,
        BLOCK=block,
        num_warps=choose_warps(block),
    )


def launch_backward(grad, keys, p, first_row, first_column, has_bias, grad_x, grad_bias):
    columns = grad.shape[-1]
    rows = grad.numel() // columns
    block = choose_block(columns)
    partial = partial_sums(grad, rows, columns)
    dropout_backward[(len(partial),)](
        grad,
        keys if p else grad,
        grad_x,
        partial,
        rows,
        columns,
        chunk_rows(rows),
        rows // grad.shape[0],
        first_row,
        first_column,
        1.0 / (1.0 - p),
        dropout_threshold(p),
        HAS_BIAS=has_bias,
        DROPOUT=p > 0,
        BLOCK=block,
        num_warps=choose_warps(block),
    )
    if has_bias:
        grad_bias.copy_(partial.sum(0))
