"""Packs weights in 4 or 8 bits an element, in blocks that share a scale, and unpacks them.

A block is `BLOCK` neighboring elements, and its scale the largest of their absolute values in fp32.
An element is stored as its quotient by the scale:

- `nf4` as the nearest of 16 values, in 4 bits: the quantiles of a normal distribution (Dettmers et
  al., 2023, QLoRA, appendix E). Table, blocks, rounding and bytes are those of bitsandbytes.
- `int8` as a whole number of 127ths.
- `fp8` as an 8-bit floating-point number (E4M3; Micikevicius et al., 2022), times 448.

These functions are PyTorch's operators, on every device.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

PackedFormat = Literal["nf4", "int8", "fp8"]
BLOCK = 64
BITS: dict[PackedFormat, int] = {"nf4": 4, "int8": 8, "fp8": 8}
LARGEST_INT8 = 127
LARGEST_FP8 = 448
# Blocks are unpacked in pieces of so many elements, so that what is computed on the way is small.
PIECE = 1 << 20
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
        return codes.view(torch.int8).float() / LARGEST_INT8
    if format == "fp8":
        return codes.view(torch.float8_e4m3fn).float() / LARGEST_FP8
    table = torch.tensor(NF4_VALUES, device=codes.device)
    # A byte holds two elements, the first one in its upper half.
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)  # [256, 2]
    return pairs[codes.int()].flatten()
