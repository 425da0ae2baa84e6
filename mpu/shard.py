"""Declares how one parameter is split over tensor-parallel ranks (`Shard`), and divides counts among ranks.

Layers, initialization, checkpoints and the converter share the declaration. Errors name the numbers of ranks that work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """The split of a full tensor along one dimension. It does not depend on the number of ranks.

    Attributes:
        shape: The full shape, without padding.
        dim: The dimension that is split (a negative number counts from the end).
        groups: Sizes of the blocks stacked along `dim`, each of which is split separately, e.g. the three blocks of a
            fused QKV weight or the two of a fused gate/up projection. Empty means one block.
        unit: Each rank's part of a block is a whole number of units, e.g. of head sizes.
        pad_multiple: 0 means that every block must divide evenly. m > 0 is for vocabularies and gated MLPs: every rank
            holds ceil(n / size) rows, rounded up to a multiple of m, and the rows after the last true row are zeros.
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
            raise ValueError(f"groups {self.groups} must be > 0 and add up to {length}, dim {self.dim} of {self.shape}")
        if self.pad_multiple < 0 or self.unit < 1:
            raise ValueError(f"pad_multiple {self.pad_multiple} must be >= 0 and unit {self.unit} >= 1")
        if self.pad_multiple and (len(self.groups) > 1 or self.unit > 1):
            raise ValueError("pad_multiple needs a single block and unit 1; drop groups and unit")
        for width in self._blocks:
            if width % self.unit:
                raise ValueError(f"a block of {width} rows is not a whole number of units of {self.unit}")

    @property
    def _blocks(self) -> tuple[int, ...]:
        return self.groups or (self.shape[self.dim],)

    def legal_sizes(self, limit: int) -> list[int]:
        """Returns the numbers of ranks up to `limit` over which this tensor can be split."""
        if self.pad_multiple:
            return list(range(1, limit + 1))
        common = gcd(*(width // self.unit for width in self._blocks))
        return [size for size in divisors(common) if size <= limit] if common else list(range(1, limit + 1))

    def check(self, size: int) -> None:
        """Raises `ValueError`, naming the sizes that work, if this tensor cannot be split over `size` ranks."""
        if size >= 1 and (self.pad_multiple or all((width // self.unit) % size == 0 for width in self._blocks)):
            return
        units = f" in units of {self.unit}" if self.unit > 1 else ""
        blocks = " + ".join(str(width // self.unit) for width in self._blocks)
        raise ValueError(
            f"{blocks} rows{units} (dim {self.dim} of {self.shape}) cannot be split {size} ways; "
            f"use {describe_sizes(self.legal_sizes(max(self.shape[self.dim], 1)))}"
        )

    def _width(self, block: int, size: int) -> int:
        """Returns the number of rows of one block on each rank, including padding."""
        width = -(-block // size)
        return -(-width // self.pad_multiple) * self.pad_multiple if self.pad_multiple else width

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Returns the shape that each of `size` ranks holds, including padding."""
        self.check(size)
        local = sum(self._width(block, size) for block in self._blocks)
        return (*self.shape[: self.dim], local, *self.shape[self.dim + 1 :])

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Returns the [start, stop) ranges along `dim` of the full tensor that `rank` holds: one per block, in order.

        Ranges exclude padding, so the range of a rank that holds only padding is empty.
        """
        self.check(size)
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is outside 0..{size - 1}")
        ranges: list[tuple[int, int]] = []
        offset = 0
        for block in self._blocks:
            width = self._width(block, size)
            ranges.append((offset + min(rank * width, block), offset + min((rank + 1) * width, block)))
            offset += block
        return ranges

    def slice(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Returns this rank's part of `full` as a new contiguous tensor; padding rows are zeros."""
        if tuple(full.shape) != self.shape:
            raise ValueError(f"expected the full tensor of shape {self.shape}, got {tuple(full.shape)}")
        pieces = [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges(rank, size)]
        local = torch.zeros(self.local_shape(size), dtype=full.dtype, device=full.device)
        offset = 0
        for piece in pieces:
            local.narrow(self.dim, offset, piece.shape[self.dim]).copy_(piece)
            offset += piece.shape[self.dim]
        return local

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the full tensor, without padding, from all ranks' parts in rank order. It inverts `slice` exactly."""
        size = len(parts)
        expected = self.local_shape(size)
        full = parts[0].new_empty(self.shape)
        for rank, part in enumerate(parts):
            if tuple(part.shape) != expected or part.dtype != full.dtype:
                raise ValueError(f"part {rank} is {part.dtype} {tuple(part.shape)}; expected {full.dtype} {expected}")
            offset = 0
            for start, stop in self.ranges(rank, size):
                full.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, offset, stop - start))
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


def divisors(count: int) -> list[int]:
    """Returns all divisors of a positive count in ascending order."""
    low = [d for d in range(1, int(count**0.5) + 1) if count % d == 0]
    return sorted({*low, *(count // d for d in low)})


def describe_sizes(sizes: Sequence[int]) -> str:
    """Returns a list for a message, such as "1, 2, 3 or 6"."""
    *head, last = (str(size) for size in sizes)
    return f"{', '.join(head)} or {last}" if head else last


def divide(count: int, size: int, what: str) -> int:
    """Returns `count / size`, e.g. `divide(12, 4, "attention heads")`.

    Raises ValueError such as "12 attention heads cannot be split 5 ways; use 1, 2, 3, 4, 6 or 12".
    """
    if size < 1 or count % size:
        choices = f"; use {describe_sizes(divisors(count))}" if count > 0 else ""
        raise ValueError(f"{count} {what} cannot be split {size} ways{choices}")
    return count // size
