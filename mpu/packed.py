"""Holds frozen matrices in 4 or 8 bits an element, and multiplies by them (QLoRA; Dettmers et al.,
2023, arXiv:2305.14314).

A rank packs its part of a matrix, as the parameter's `Shard` says. The blocks are those of the
whole matrix, row by row, under every layout: element (r, c) of [out, in] belongs to the block
(r · in + c) // 64. So the unpacked values do not depend on the number of ranks. Where the ranks'
parts begin at blocks, each rank keeps the scales of its own blocks. Otherwise the ranks compare the
scales of the blocks that they share, and keep those of the whole matrix.

Nothing but the packed bytes is kept for the backward pass, which unpacks them once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import linear, matmul
from ..ops.autograd import Function, once_differentiable
from ..ops.packing import (
    BITS,
    BLOCK,
    PIECE,
    PackedFormat,
    can_multiply_packed,
    decode,
    encode,
    multiply_packed,
    unpack_blocks,
)
from .mesh import ParallelMesh, tp_rank, tp_size
from .parameter import SplitParameter
from .shard import Range, Shard

SCALE_BYTES = 4  # of an fp32 number
PIECE_BYTES = 8 * PIECE  # of what is computed on the way to a piece of an unpacked matrix


def count_packed_bytes(shape: tuple[int, ...], format: PackedFormat) -> int:
    """Returns the bytes of a rank's part [out, in] of a matrix whose rows are whole blocks."""
    blocks = shape[0] * -(-shape[1] // BLOCK)
    return blocks * (SCALE_BYTES + BLOCK * BITS[format] // 8)


@dataclass(frozen=True)
class PackedLayout:
    """Where the elements and scales of a rank's part of a matrix lie in its bytes.

    The scales come first, then the elements in rows, each of which is filled up with zeros to whole
    blocks.

    Attributes:
        shape: [out, in] of this rank's part, with padding.
        dtype: The type in which the matrix was read, and is unpacked by default.
        whole: [out, in] of the whole matrix, without padding.
        rows, columns: The ranges of the whole matrix that the rank holds.
        is_aligned: Whether this rank's part consists of whole blocks, whose scales it keeps.
        is_flat: Whether blocks go on from row to row.
    """

    format: PackedFormat
    shape: tuple[int, int]
    dtype: torch.dtype
    whole: tuple[int, int]
    rows: tuple[Range, ...]
    columns: Range
    is_aligned: bool
    is_flat: bool

    @classmethod
    def from_shard(
        cls, format: PackedFormat, part: Tensor, shard: Shard, rank: int, size: int
    ) -> PackedLayout:
        """Finds the layout of a rank's part [out, in] of a matrix."""
        out_features, in_features = shard.shape
        rows: tuple[Range, ...] = ((0, out_features),)
        columns = (0, in_features)
        edges = [0, in_features]
        if shard.dim == 0:
            rows = tuple(shard.ranges(rank, size))
        else:
            [columns] = shard.ranges(rank, size)
            for other in range(size):
                edges += shard.ranges(other, size)[0]
        shape = (part.shape[0], part.shape[1])
        has_whole_rows = not any(edge % BLOCK for edge in edges)
        is_whole = shape == (out_features, in_features)
        return cls(
            format,
            shape,
            part.dtype,
            (out_features, in_features),
            rows,
            columns,
            is_aligned=has_whole_rows or is_whole,
            is_flat=not has_whole_rows,
        )

    @property
    def lines(self) -> tuple[int, int]:
        """The number of rows of elements, and the blocks of each."""
        out_features, in_features = self.shape
        if self.is_flat:
            return 1, -(-out_features * in_features // BLOCK)
        return out_features, -(-in_features // BLOCK)

    @property
    def scales(self) -> int:
        """The number of scales."""
        if self.is_aligned:
            count, blocks = self.lines
            return count * blocks
        return -(-self.whole[0] * self.whole[1] // BLOCK)

    @property
    def nbytes(self) -> int:
        """The number of bytes of scales and elements."""
        count, blocks = self.lines
        return SCALE_BYTES * self.scales + count * blocks * BLOCK * BITS[self.format] // 8

    def find_blocks(self, first: int, last: int, device: torch.device) -> Tensor:
        """Returns the blocks of the elements [first, last) in the whole matrix, int64.

        Padding, which is zero, gets any block.
        """
        elements = torch.arange(first, last, device=device)
        numbers = [torch.arange(start, stop, device=device) for start, stop in self.rows]
        rows = torch.cat(numbers)
        local_rows = (elements // self.shape[1]).clamp(max=max(len(rows) - 1, 0))
        own_rows = rows[local_rows] if len(rows) else torch.zeros_like(elements)
        places = own_rows * self.whole[1] + self.columns[0] + elements % self.shape[1]
        return (places // BLOCK).clamp(max=self.scales - 1)


class PackedParameter(SplitParameter):
    """The bytes of a packed matrix, uint8 [bytes]: a parameter that is not trained.

    Attributes:
        packing: What they mean.
    """

    packing: PackedLayout

    @property
    def scales(self) -> Tensor:
        """fp32 [scales]."""
        return self.data[: SCALE_BYTES * self.packing.scales].view(torch.float32)

    @property
    def codes(self) -> Tensor:
        """The bytes of the elements."""
        return self.data[SCALE_BYTES * self.packing.scales :]

    def unpack(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the matrix [out, in] that the bytes stand for, by default in its own type."""
        layout = self.packing
        count, blocks = layout.lines
        dtype = dtype or layout.dtype
        values = self._unpack_aligned(dtype) if layout.is_aligned else self._unpack_shared(dtype)
        out_features, in_features = layout.shape
        if layout.is_flat:
            return values[: out_features * in_features].view(out_features, in_features)
        return values.view(count, blocks * BLOCK)[:, :in_features].contiguous()

    def _unpack_aligned(self, dtype: torch.dtype) -> Tensor:
        """Returns the elements of all lines, of blocks that have their scales in order."""
        layout = self.packing
        codes = self.codes.view(layout.scales, -1)
        return unpack_blocks(codes, self.scales, layout.format, dtype).flatten()

    def _unpack_shared(self, dtype: torch.dtype) -> Tensor:
        """Returns the elements of all lines, of which each looks up its block's scale."""
        layout = self.packing
        count, blocks = layout.lines
        total = count * blocks * BLOCK
        bits = BITS[layout.format]
        codes = self.codes
        values = torch.empty(total, dtype=dtype, device=codes.device)
        for first in range(0, total, PIECE):
            last = min(first + PIECE, total)
            piece = decode(codes[first * bits // 8 : last * bits // 8], layout.format)
            values[first:last] = piece * self.scales[layout.find_blocks(first, last, codes.device)]
        return values

    def apply_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x Wᵀ + bias, [..., out] of x [..., in] and bias [out].

        Few rows on an accelerator are multiplied without unpacking the matrix.
        """
        layout = self.packing
        rows = x.flatten(0, -2)
        if layout.is_flat or not can_multiply_packed(rows):
            return linear(x, self.unpack(x.dtype), bias)
        count, blocks = layout.lines
        codes = self.codes.view(count, -1)
        y = multiply_packed(rows, codes, self.scales.view(count, blocks), layout.format)
        if bias is not None:
            y = y + bias
        return torch.unflatten(y, 0, x.shape[:-1])


class PackedWriter:
    """Packs matrices that arrive one after another.

    Those whose blocks several ranks share wait, unpacked, until `finish` compares their scales.
    """

    def __init__(
        self, format: PackedFormat, mesh: ParallelMesh | None, device: torch.device
    ) -> None:
        self.format: PackedFormat = format
        self.mesh = mesh
        self.device = device
        self._waiting: list[tuple[PackedParameter, Tensor]] = []

    @torch.no_grad()
    def pack(self, part: Tensor, like: SplitParameter) -> PackedParameter:
        """Returns the packed part [out, in] of a matrix, with the attributes of `like`."""
        layout = PackedLayout.from_shard(
            self.format, part, like.shard, tp_rank(self.mesh), tp_size(self.mesh)
        )
        data = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self.device)
        packed = PackedParameter(data, requires_grad=False)
        vars(packed).update(vars(like))
        packed.packing = layout
        if layout.is_aligned:
            self._encode(packed, self._arrange(part, layout))
        else:
            self._waiting.append((packed, part))
        return packed

    @torch.no_grad()
    def finish(self) -> None:
        """Packs what waits. Collective over the tensor-parallel ranks."""
        for packed, part in self._waiting:
            layout = packed.packing
            values = self._arrange(part, layout)
            blocks = layout.find_blocks(0, len(values), self.device)
            # The exchange runs on the mesh's device, which may be another one.
            found = torch.zeros(layout.scales, device=self.device)
            found.scatter_reduce_(0, blocks, values.float().abs(), "amax")
            if self.mesh is not None and self.mesh.tp_size > 1:
                exchanged = found.to(self.mesh.device_type)
                cast(Any, dist).all_reduce(exchanged, dist.ReduceOp.MAX, group=self.mesh.tp_group)
                found = exchanged.to(self.device)
            packed.scales.copy_(found)
            self._encode(packed, values)
        self._waiting.clear()

    def _arrange(self, part: Tensor, layout: PackedLayout) -> Tensor:
        """Returns the elements in rows of whole blocks."""
        count, blocks = layout.lines
        lines = part.to(self.device).reshape(count, -1)
        missing = blocks * BLOCK - lines.shape[1]
        if missing:
            lines = torch.nn.functional.pad(lines, (0, missing))
        return lines.flatten()

    def _encode(self, packed: PackedParameter, values: Tensor) -> None:
        """Writes the bytes of the elements, and the scales of blocks that the rank has alone."""
        layout = packed.packing
        bits = BITS[layout.format]
        scales = packed.scales
        codes = packed.codes
        for first in range(0, len(values), PIECE):
            last = min(first + PIECE, len(values))
            piece = values[first:last].float()
            if layout.is_aligned:
                own = piece.view(-1, BLOCK).abs().amax(1)
                scales[first // BLOCK : last // BLOCK] = own
                own = own.repeat_interleave(BLOCK)
            else:
                own = scales[layout.find_blocks(first, last, self.device)]
            codes[first * bits // 8 : last * bits // 8] = encode(piece, own, layout.format)


def packed_linear(x: Tensor, weight: PackedParameter, bias: Tensor | None) -> Tensor:
    """Returns `linear(x, weight, bias)`, [..., out] of x [..., in] and bias [out]; see the file's
    docstring.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    if bias is not None:
        bias = bias.to(x.dtype)
    return _PackedLinear.apply(x, bias, weight)


class _PackedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: PackedParameter) -> Tensor:
        ctx.weight = weight
        return weight.apply_linear(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        grad = grads[0]
        needs_input, needs_bias = ctx.needs_input_grad[:2]
        input_grad = None
        if needs_input:
            rows = matmul(grad.flatten(0, -2), ctx.weight.unpack(grad.dtype))
            input_grad = torch.unflatten(rows, 0, grad.shape[:-1])
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        return input_grad, bias_grad, None
