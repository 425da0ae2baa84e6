"""Packed weights in Triton: their values, and products with few rows."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import ceil_div

LENGTH = tl.constexpr(64)  # elements of a block, which share a scale
BLOCKS = 16  # that a program unpacks
# The tile of a product.
ROWS = 16
COLUMNS = 32


@triton.jit
def decode_blocks(codes_ptr, table_ptr, blocks, inside, BITS: tl.constexpr):
    """Returns the quotients [N, LENGTH] of blocks [N] of `BITS` bits an element."""
    if BITS == 4:
        byte = tl.arange(0, LENGTH // 2)
        at = blocks[:, None] * (LENGTH // 2) + byte[None, :]
        codes = tl.load(codes_ptr + at, mask=inside[:, None], other=0).to(tl.int32)
        # A byte holds two elements, the first one in its upper half.
        numbers = tl.interleave(codes >> 4, codes & 15)
    else:
        byte = tl.arange(0, LENGTH)
        at = blocks[:, None] * LENGTH + byte[None, :]
        numbers = tl.load(codes_ptr + at, mask=inside[:, None], other=0).to(tl.int32)
    return tl.load(table_ptr + numbers)


@triton.jit
def unpack_blocks(
    codes_ptr, scales_ptr, table_ptr, y_ptr, count, BITS: tl.constexpr, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < count
    values = decode_blocks(codes_ptr, table_ptr, block, inside, BITS)
    scale = tl.load(scales_ptr + block, mask=inside, other=0.0)
    at = block[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    values = (values * scale[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, values, mask=inside[:, None])


@triton.jit
def packed_product(
    x_ptr,
    codes_ptr,
    scales_ptr,
    table_ptr,
    y_ptr,
    rows,
    outputs,
    blocks,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    has_row = row < rows
    has_output = output < outputs
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for number in range(blocks):
        column = number * LENGTH + tl.arange(0, LENGTH)
        at = row[:, None] * (blocks * LENGTH) + column[None, :]
        x = tl.load(x_ptr + at, mask=has_row[:, None], other=0.0)
        block = output * blocks + number
        weights = decode_blocks(codes_ptr, table_ptr, block, has_output, BITS)
        scale = tl.load(scales_ptr + block, mask=has_output, other=0.0)
        # Rounded as unpacked weights are.
        weights = (weights * scale[:, None]).to(x.dtype)
        sums = tl.dot(x, tl.trans(weights), sums, input_precision="ieee")
    at = row[:, None] * outputs + output[None, :]
    tl.store(
        y_ptr + at, sums.to(y_ptr.dtype.element_ty), mask=has_row[:, None] & has_output[None, :]
    )


def launch_unpack(codes, scales, table, values):
    count = len(codes)
    grid = (ceil_div(count, BLOCKS),)
    bits = 4 if len(table) == 16 else 8
    unpack_blocks[grid](codes, scales, table, values, count, BITS=bits, BLOCKS=BLOCKS)


def launch_product(x, codes, scales, table, y):
    rows = len(x)
    outputs = len(codes)
    grid = (ceil_div(rows, ROWS), ceil_div(outputs, COLUMNS))
    packed_product[grid](
        x,
        codes,
        scales,
        table,
        y,
        rows,
        outputs,
        scales.shape[1],
        BITS=4 if len(table) == 16 else 8,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
