"""Masked softmax and its gradient in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dropout_mask import attention_rows, dropout_threshold, row_keys
from .common import choose_block, choose_warps, keep_factor, pointer


@triton.jit
def softmax_forward(
    scores_ptr,
    mask_ptr,
    bias_ptr,
    prefix_ptr,
    row_keys_ptr,
    probs_ptr,
    dropped_ptr,
    heads,
    queries,
    columns,
    mask_stride_b,
    mask_stride_n,
    mask_stride_q,
    bias_stride_b,
    bias_stride_n,
    bias_stride_q,
    scale: tl.float32,
    keep_scale: tl.float32,
    threshold,
    MASK: tl.constexpr,  # 0: none, 1: boolean, 2: added
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    q = row % queries
    n = row // queries % heads
    b = row // queries // heads
    column = tl.arange(0, BLOCK)
    inside = column < columns
    if CAUSAL:
        limit = q + columns - queries + 1
        if HAS_PREFIX:
            limit = tl.maximum(limit, tl.load(prefix_ptr + b))
        inside = inside & (column < limit)
    at = row * columns + column
    z = tl.load(scores_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_BIAS:
        bias = bias_ptr + b * bias_stride_b + n * bias_stride_n + q * bias_stride_q + column
        z += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    mask = mask_ptr + b * mask_stride_b + n * mask_stride_n + q * mask_stride_q + column
    if MASK == 2:
        z += tl.load(mask, mask=inside, other=0.0).to(tl.float32)
    visible = inside
    if MASK == 1:
        visible = visible & (tl.load(mask, mask=inside, other=0) != 0)
    z = tl.where(visible, z, float("-inf"))
    top = tl.max(tl.where(z == z, z, float("-inf")), axis=0)
    e = tl.exp(z - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(e, axis=0)
    p = e * tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    written = column < columns
    tl.store(probs_ptr + at, p.to(probs_ptr.dtype.element_ty), mask=written)
    if DROPOUT:
        keep = keep_factor(tl.load(row_keys_ptr + row), column, threshold, keep_scale)
        p = tl.where(keep == 0.0, 0.0, p * keep)
        tl.store(dropped_ptr + at, p.to(dropped_ptr.dtype.element_ty), mask=written)


@triton.jit
def softmax_backward(
    grad_ptr,
    probs_ptr,
    row_keys_ptr,
    grad_scores_ptr,
    grad_bias_ptr,
    batch,
    plane,  # heads * queries
    columns,
    scale: tl.float32,
    keep_scale: tl.float32,
    threshold,
    BIAS: tl.constexpr,  # 0: none, 1: summed over the batch, 2: one per sample
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    bias_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(batch):
        row = b * plane + unit
        at = row * columns + column
        g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(probs_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            keep = keep_factor(tl.load(row_keys_ptr + row), column, threshold, keep_scale)
            g = tl.where(keep == 0.0, 0.0, g * keep)
        grad_z = p * (g - tl.sum(g * p, axis=0))
        tl.store(
            grad_scores_ptr + at, (grad_z * scale).to(grad_scores_ptr.dtype.element_ty), mask=inside
        )
        if BIAS == 2:
            tl.store(grad_bias_ptr + at, grad_z.to(grad_bias_ptr.dtype.element_ty), mask=inside)
        bias_sum += grad_z
    if BIAS == 1:
        at = unit * columns + column
        tl.store(grad_bias_ptr + at, bias_sum.to(grad_bias_ptr.dtype.element_ty), mask=inside)


def launch_forward(scores, mask, bias, prefix, keys, scale, causal, p, first_head, probs, dropped):
    batch, heads, queries, columns = scores.shape
    boolean = mask is not None and mask.dtype == torch.bool
    block = choose_block(columns)
    softmax_forward[(batch * heads * queries,)](
        scores,
        pointer(mask.view(torch.uint8) if boolean else mask, scores),
        pointer(bias, scores),
        pointer(prefix, scores),
        row_keys(keys, attention_rows(first_head, heads, queries, keys.device)) if p else scores,
        probs,
        dropped,
        heads,
        queries,
        columns,
        *(mask.stride()[:3] if mask is not None else (0, 0, 0)),
        *(bias.stride()[:3] if bias is not None else (0, 0, 0)),
        scale,
        1.0 / (1.0 - p),
        dropout_threshold(p),
        MASK=0 if mask is None else 1 if boolean else 2,
        HAS_BIAS=bias is not None,
        CAUSAL=causal,
        HAS_PREFIX=prefix is not None,
        DROPOUT=p > 0,
        BLOCK=block,
        num_warps=choose_warps(block),
    )


def launch_backward(grad, probs, keys, scale, p, first_head, bias_batch, grad_scores, grad_bias):
    batch, heads, queries, columns = probs.shape
    block = choose_block(columns)
    softmax_backward[(heads * queries,)](
        grad,
        probs,
        row_keys(keys, attention_rows(first_head, heads, queries, keys.device)) if p else probs,
        grad_scores,
        grad_bias,
        batch,
        heads * queries,
        columns,
        scale,
        1.0 / (1.0 - p),
        dropout_threshold(p),
        BIAS=0 if bias_batch == 0 else 1 if bias_batch == 1 else 2,
        DROPOUT=p > 0,
        BLOCK=block,
        num_warps=choose_warps(block),
    )
