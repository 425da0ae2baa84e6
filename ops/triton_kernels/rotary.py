"""Rotary positions of queries and keys, in Triton: one launch rotates both."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import next_power_of_2
from .launching import launch

HEADS = 8  # of a tile


@triton.jit
def turn(
    x_ptr,
    x_strides,
    y_ptr,
    y_strides,
    heads,
    size,
    rotated,
    cos,
    sin,
    b,
    s,
    sign,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotates all heads of a position by the angles cos and sin [1, PAIRS].

    Each product is rounded before the sum.
    """
    dtype = y_ptr.dtype.element_ty
    x_start = x_ptr + b * x_strides[0] + s * x_strides[2]
    y_start = y_ptr + b * y_strides[0] + s * y_strides[2]
    pair = tl.arange(0, PAIRS)[None, :]
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + rotated // 2
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        inside = (head < heads) & (pair < rotated // 2)
        x_row = x_start + head * x_strides[1]
        y_row = y_start + head * y_strides[1]
        a = tl.load(x_row + first * x_strides[3], mask=inside, other=0.0).to(tl.float32)
        c = tl.load(x_row + second * x_strides[3], mask=inside, other=0.0).to(tl.float32)
        a_cos = (a * cos).to(dtype).to(tl.float32)
        c_sin = (c * sin).to(dtype).to(tl.float32)
        c_cos = (c * cos).to(dtype).to(tl.float32)
        a_sin = (a * sin).to(dtype).to(tl.float32)
        tl.store(y_row + first, (a_cos - sign * c_sin).to(dtype), mask=inside)
        tl.store(y_row + second, (c_cos + sign * a_sin).to(dtype), mask=inside)
        if REST > 0:
            column = rotated + tl.arange(0, REST)[None, :]
            kept = (head < heads) & (column < size)
            rest = tl.load(x_row + column * x_strides[3], mask=kept, other=0.0)
            tl.store(y_row + column, rest, mask=kept)


@triton.jit
def rotate(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    turned_q_ptr,
    turned_k_ptr,
    q_strides,
    k_strides,
    turned_q_strides,
    turned_k_strides,
    q_heads,
    k_heads,
    length,
    size,
    rotated,
    angles_of_sample,
    sign: tl.float32,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotates a position's queries and keys."""
    position = tl.program_id(0).to(tl.int64)
    b = position // length
    s = position % length
    pair = tl.arange(0, PAIRS)[None, :]
    at = b * angles_of_sample + s * (rotated // 2) + pair
    inside = pair < rotated // 2
    cos = tl.load(cos_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=inside, other=0.0).to(tl.float32)
    turn(
        q_ptr, q_strides, turned_q_ptr, turned_q_strides, q_heads, size, rotated, cos, sin, b, s, sign,
        INTERLEAVED, PAIRS, REST, HEADS,
    )  # fmt: skip
    turn(
        k_ptr, k_strides, turned_k_ptr, turned_k_strides, k_heads, size, rotated, cos, sin, b, s, sign,
        INTERLEAVED, PAIRS, REST, HEADS,
    )  # fmt: skip


def launch_rotation(q, k, cos, sin, interleaved, inverse, turned_q, turned_k):
    batch, q_heads, length, size = q.shape
    rotated = 2 * cos.shape[-1]
    rest = size - rotated
    angles_of_sample = 0 if cos.shape[0] == 1 else length * rotated // 2
    sign = -1.0 if inverse else 1.0
    tensors = (q, k, cos, sin, turned_q, turned_k)
    strides = (q.stride(), k.stride(), turned_q.stride(), turned_k.stride())
    sizes = (q_heads, k.shape[1], length, size, rotated)
    constants = {
        "INTERLEAVED": interleaved,
        "PAIRS": next_power_of_2(max(rotated // 2, 1)),
        "REST": next_power_of_2(rest) if rest else 0,
        "HEADS": HEADS,
    }
    # A fused multiplication and addition would not round the product.
    launch(
        rotate,
        batch * length,
        (*tensors, *strides, *sizes, angles_of_sample, sign),
        constants,
        num_warps=4,
        enable_fp_fusion=False,
    )
