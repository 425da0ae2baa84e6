"""Declares how one parameter is split over tensor-parallel ranks (`Shard`), and divides counts among ranks.

Layers, initialization, checkpoints and the converter share the declaration. Errors name the numbers of ranks that work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

import torch
from torch import Tensor

from .division import describe_sizes, divisors, first_unit


@dataclass(frozen=True)
class Shard:
    """The split of a full tensor along one dimension. It does not depend on the number of ranks.

    Of n units, rank r of t holds those from ceil(r n / t) to ceil((r + 1) n / t), so ranks differ by at most one unit
    and the first rank holds the most. No row is on two ranks.

    Attributes:
        shape: The full shape, without padding.
        dim: The dimension that is split (a negative number counts from the end).
        groups: Sizes of the blocks stacked along `dim`, each of which is split separately, e.g. the three blocks of a
            fused QKV weight. Empty means one block.
        unit: Each rank's part of a block is a whole number of units, e.g. of head sizes. The exception is a shared
            block (see `is_shared`), which is split by rows.
        pad_multiple: 0 means no padding, and at most as many ranks as units. m > 0 is for vocabularies and gated MLPs:
            every rank holds ceil(n / size) rows, rounded up to a multiple of m, and the rows after the last true row
            are zeros.
        tied_to: The name of the parameter that has the same values, or None.
    """

    shape: tuple[int, ...]
    dim: int
    groups: tuple[int, ...] = ()
    unit: int = 1
    pad_multiple: int = 0
    tied_to: str | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # a frozen dataclass sets its own fields this way
        set_field(self, "shape", tuple(self.shape))
        set_field(self, "groups", tuple(self.groups))
        if not -len(self.shape) <= self.dim < len(self.shape):
            raise ValueError(f"dim {self.dim} is outside a tensor of shape {self.shape}")
        set_field(self, "dim", self.dim % len(self.shape))
        length = self.shape[self.dim]
        if self.groups and (sum(self.groups) != length or min(self.groups) < 1):
            raise ValueError(
                f"groups {self.groups} must be > 0 and add up to {length}, dim {self.dim} of {self.shape}"
            )
        if self.pad_multiple < 0 or self.unit < 1:
            raise ValueError(
                f"pad_multiple {self.pad_multiple} must be >= 0 and unit {self.unit} >= 1"
            )
        if self.pad_multiple and (len(self.groups) > 1 or self.unit > 1):
            raise ValueError("pad_multiple needs a single block and unit 1; drop groups and unit")
        for width in self._blocks:
            if width % self.unit:
                raise ValueError(
                    f"a block of {width} rows is not a whole number of units of {self.unit}"
                )

    @property
    def _blocks(self) -> tuple[int, ...]:
        return self.groups or (self.shape[self.dim],)

    @property
    def largest_size(self) -> int | None:
        """The largest number of ranks over which this tensor can be split; None if any number will do."""
        if self.pad_multiple or not max(self._blocks):
            return None
        widest = max(self._blocks)
        return (
            min(width for width in self._blocks if width == widest or widest % width) // self.unit
        )

    def check(self, size: int) -> None:
        """Raises `ValueError`, naming the sizes that work, if this tensor cannot be split over `size` ranks."""
        largest = self.largest_size
        if size < 1 or (largest is not None and size > largest):
            raise ValueError(
                f"{self._rows()} cannot be split {size} ways; use 1 to {largest or 'any number of'} ranks"
            )

    def check_even(self, size: int) -> None:
        """Raises `ValueError`, naming the sizes that work, unless all ranks hold equal parts without padding."""
        counts = [width // self.unit for width in self._blocks]
        if size < 1 or any(count % size for count in counts):
            sizes = describe_sizes(divisors(gcd(*counts))) if any(counts) else "1"
            raise ValueError(f"{self._rows()} cannot be split {size} ways evenly; use {sizes}")

    def _rows(self) -> str:
        units = f" in units of {self.unit}" if self.unit > 1 else ""
        blocks = " + ".join(str(width // self.unit) for width in self._blocks)
        return f"{blocks} rows{units} (dim {self.dim} of {self.shape})"

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    def shared_blocks(self, size: int) -> list[int]:
        """Returns the numbers of the blocks that `size` ranks share."""
        return [block for block in range(self.blocks) if self.is_shared(block, size)]

    def is_shared(self, block: int, size: int) -> bool:
        """Returns whether some ranks compute with the same units of a block.

        These are the key-value heads of grouped queries, if `size` does not divide them. Each rank holds an equal part
        of the block's rows, and needs the units that belong to its part of the widest block.
        """
        width, widest = self._blocks[block], max(self._blocks)
        return width < widest and widest % width == 0 and (width // self.unit) % size > 0

    def _bounds(self, block: int, rank: int, size: int) -> tuple[int, int]:
        """Returns the rows [start, stop) of a block that a rank holds, without padding."""
        width = self._blocks[block]
        if self.pad_multiple:
            local = self._padded(width, size)
            return min(rank * local, width), min((rank + 1) * local, width)
        unit = 1 if self.is_shared(block, size) else self.unit
        return first_unit(width // unit, rank, size) * unit, first_unit(
            width // unit, rank + 1, size
        ) * unit

    def _padded(self, width: int, size: int) -> int:
        return -(-width // size // self.pad_multiple) * self.pad_multiple

    def local_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Returns the shape of what `rank` of `size` holds, including padding. Rank 0 holds the most."""
        return self._with_rows(self.ranges(rank, size), size)

    def needed_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Returns the shape of what `rank` of `size` computes with, including padding and rows that others lend."""
        return self._with_rows(self.needed_ranges(rank, size), size)

    def _with_rows(self, ranges: Sequence[tuple[int, int]], size: int) -> tuple[int, ...]:
        length = sum(stop - start for start, stop in ranges)
        length = self._padded(self.shape[self.dim], size) if self.pad_multiple else length
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Returns the [start, stop) ranges along `dim` of the full tensor that `rank` holds: one per block, in order.

        Ranges exclude padding, so the range of a rank that holds only padding is empty.
        """
        return self._in_tensor(
            [self._bounds(block, rank, size) for block in self._checked(rank, size)]
        )

    def needed_ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Returns the ranges along `dim` that `rank` computes with: `ranges`, except for shared blocks."""
        needed: list[tuple[int, int]] = []
        widest = max(self._blocks)
        for block in self._checked(rank, size):
            start, stop = self._bounds(block, rank, size)
            if self.is_shared(block, size):
                served = (
                    widest // self._blocks[block]
                )  # units of the widest block that share one unit of this one
                start, stop = (first_unit(widest // self.unit, r, size) for r in (rank, rank + 1))
                start, stop = start // served * self.unit, -(-stop // served) * self.unit
            needed.append((start, stop))
        return self._in_tensor(needed)

    def _checked(self, rank: int, size: int) -> range:
        self.check(size)
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is outside 0..{size - 1}")
        return range(len(self._blocks))

    def _in_tensor(self, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        offsets = accumulate(self._blocks, initial=0)
        return [
            (offset + start, offset + stop)
            for offset, (start, stop) in zip(offsets, ranges, strict=False)
        ]

    def slice(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Returns this rank's part of `full` as a new contiguous tensor; padding rows are zeros."""
        if tuple(full.shape) != self.shape:
            raise ValueError(
                f"expected the full tensor of shape {self.shape}, got {tuple(full.shape)}"
            )
        pieces = [
            full.narrow(self.dim, start, stop - start) for start, stop in self.ranges(rank, size)
        ]
        local = torch.zeros(self.local_shape(rank, size), dtype=full.dtype, device=full.device)
        offset = 0
        for piece in pieces:
            local.narrow(self.dim, offset, piece.shape[self.dim]).copy_(piece)
            offset += piece.shape[self.dim]
        return local

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the full tensor, without padding, from all ranks' parts in rank order. It inverts `slice` exactly."""
        size = len(parts)
        full = parts[0].new_empty(self.shape)
        for rank, part in enumerate(parts):
            expected = self.local_shape(rank, size)
            if tuple(part.shape) != expected or part.dtype != full.dtype:
                raise ValueError(
                    f"part {rank} is {part.dtype} {tuple(part.shape)}; expected {full.dtype} {expected}"
                )
            offset = 0
            for start, stop in self.ranges(rank, size):
                full.narrow(self.dim, start, stop - start).copy_(
                    part.narrow(self.dim, offset, stop - start)
                )
                offset += stop - start
        return full

    def describe(self) -> str:
        """Returns one line for a layer's `extra_repr`."""
        notes = [f"{'x'.join(map(str, self.shape))} split along {self.dim}"]
        if len(self.groups) > 1:
            notes.append(f"in blocks {'+'.join(map(str, self.groups))}")
        if self.unit > 1:
            notes.append(f"in units of {self.unit}")
        if self.pad_multiple:
            notes.append(f"padded to multiples of {self.pad_multiple}")
        if self.tied_to:
            notes.append(f"tied to {self.tied_to}")
        return " ".join(notes)
