"""Packs weights in 4 or 8 bits an element, in blocks that share a scale, and unpacks them.

A block is `BLOCK` neighboring elements, and its scale the largest of their absolute values in fp32.
An element is stored as its quotient by the scale:

- `nf4` as the nearest of 16 values, in 4 bits: the quantiles of a normal distribution (Dettmers et
  al., 2023, QLoRA, appendix E). Table, blocks, rounding and bytes are those of bitsandbytes.
- `int8` as a whole number of 127ths.
- `fp8` as an 8-bit floating-point number (E4M3; Micikevicius et al., 2022), times 448.

Packing uses PyTorch's operators on every device. On an accelerator with Triton one kernel unpacks
the blocks of a matrix, and another multiplies few rows by a packed matrix without unpacking it in
memory.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from .registration import Op, same_dtype

PackedFormat = Literal["nf4", "int8", "fp8"]
BLOCK = 64
BITS: dict[PackedFormat, int] = {"nf4": 4, "int8": 8, "fp8": 8}
LARGEST_INT8 = 127
LARGEST_FP8 = 448
# Blocks are unpacked in pieces of so many elements, so that what is computed on the way is small.
PIECE = 1 << 20
FEW_ROWS = 16  # for which a product reads the packed matrix itself
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def encode(values: Tensor, scales: Tensor, format: PackedFormat) -> Tensor:
    """Returns the bytes, uint8 [N · bits / 8], of fp32 values.

    Args:
        values: [N], of which N is even.
        scales: [N] or what broadcasts to it; at least the absolute values.
    """
    quotients = (values * (1.0 / scales.clamp(min=1e-38))).clamp(-1, 1)
    if format == "int8":
        return (quotients * LARGEST_INT8).round().to(torch.int8).view(torch.uint8)
    if format == "fp8":
        return (quotients * LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)
    table = torch.tensor(NF4_VALUES, device=values.device)
    middles = (table[:-1] + table[1:]) / 2
    numbers = torch.bucketize(quotients, middles, out_int32=True).to(torch.uint8)
    return (numbers[::2] << 4) | numbers[1::2]


def decode(codes: Tensor, format: PackedFormat) -> Tensor:
    """Returns the quotients, fp32 [N], that bytes stand for; see `encode`."""
    if format == "int8":
        return codes.flatten().view(torch.int8).float() / LARGEST_INT8
    if format == "fp8":
        return codes.flatten().view(torch.float8_e4m3fn).float() / LARGEST_FP8
    return _look_up(codes, _find_table(format, codes.device))


@cache
def _find_table(format: PackedFormat, device: torch.device) -> Tensor:
    """Returns the quotient of each code, fp32 [16] for 4 bits or [256] for 8."""
    if format == "nf4":
        return torch.tensor(NF4_VALUES, device=device)
    codes = torch.arange(256, dtype=torch.uint8)
    if format == "int8":
        return (codes.view(torch.int8).float() / LARGEST_INT8).to(device)
    return (codes.view(torch.float8_e4m3fn).float() / LARGEST_FP8).to(device)


def _look_up(codes: Tensor, table: Tensor) -> Tensor:
    """Returns the quotients, fp32 [N], of bytes of any shape by a table of all codes."""
    if len(table) == 256:
        return table[codes.flatten().int()]
    # A byte holds two elements, the first one in its upper half.
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)  # [256, 2]
    return pairs[codes.flatten().int()].flatten()


def unpack_blocks(
    codes: Tensor, scales: Tensor, format: PackedFormat, dtype: torch.dtype
) -> Tensor:
    """Returns the values [N, BLOCK] of blocks. The gradient is not recorded.

    Args:
        codes: uint8 [N, BLOCK · bits / 8].
        scales: fp32 [N].
    """
    table = _find_table(format, codes.device)
    values = torch.empty(len(codes), BLOCK, dtype=dtype, device=codes.device)
    if unpack_blocks_op.run_fast((codes, scales, table), (values,)):
        return values
    step = PIECE // BLOCK
    for first in range(0, len(codes), step):
        part = slice(first, first + step)
        values[part] = decode(codes[part], format).view(-1, BLOCK) * scales[part, None]
    return values


def can_multiply_packed(x: Tensor) -> bool:
    """Returns whether `multiply_packed` is faster for x [M, K] than unpacking the matrix."""
    if len(x) > FEW_ROWS or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    return multiply_packed_op.choose_variant(x.device.type) == "triton"


def multiply_packed(x: Tensor, codes: Tensor, scales: Tensor, format: PackedFormat) -> Tensor:
    """Returns x Wᵀ, [M, N], of a packed matrix W [N, K]. The gradient is not recorded.

    Args:
        x: [M, K].
        codes: uint8 [N, K · bits / 8], of rows of whole blocks.
        scales: fp32 [N, K / BLOCK].
    """
    return multiply_packed_op(x, codes, scales, _find_table(format, x.device))


# The definitions, which the kernels are compared with.


def unpack_blocks_reference(codes, scales, table):
    """Computes the definition, in fp32."""
    return (_look_up(codes, table).view(-1, BLOCK) * scales[:, None],)


def multiply_packed_reference(x, codes, scales, table):
    """Computes the definition; the weights are rounded to the type of x."""
    weights = _look_up(codes, table).view(*scales.shape, BLOCK) * scales[..., None]
    return (x @ weights.flatten(1).to(x.dtype).T,)


# The registration.


def _allocate_unpack_blocks(codes, scales, table):
    return (scales.new_empty(len(codes), BLOCK),)


def _prepare_unpack_blocks(codes, scales, table):
    return codes.contiguous(), scales.contiguous(), table


def _allocate_multiply_packed(x, codes, scales, table):
    return (x.new_empty(len(x), len(codes)),)


def _prepare_multiply_packed(x, codes, scales, table):
    return same_dtype(x) or (x.contiguous(), codes.contiguous(), scales.contiguous(), table)


def _launch_triton_unpack_blocks(*arguments):
    from .triton_kernels.packing import launch_unpack

    launch_unpack(*arguments)


def _launch_triton_multiply_packed(*arguments):
    from .triton_kernels.packing import launch_product

    launch_product(*arguments)


unpack_blocks_op = Op(
    "unpack_blocks",
    "Tensor codes, Tensor scales, Tensor table",
    ("values",),
    allocate=_allocate_unpack_blocks,
    reference=unpack_blocks_reference,
    prepare=_prepare_unpack_blocks,
    compiled=(),
    triton=_launch_triton_unpack_blocks,
)

multiply_packed_op = Op(
    "multiply_packed",
    "Tensor x, Tensor codes, Tensor scales, Tensor table",
    ("y",),
    allocate=_allocate_multiply_packed,
    reference=multiply_packed_reference,
    prepare=_prepare_multiply_packed,
    compiled=(),
    triton=_launch_triton_multiply_packed,
)
