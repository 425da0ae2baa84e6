"""Declares how one parameter is split over the ranks of a mesh (`Shard`).

Layers, initialization, checkpoints and the converter share the declaration. It does not depend on
the number of ranks. Errors name the numbers of ranks that work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Any

import torch
from torch import Tensor

from .division import describe_sizes, divisors, find_first_unit
from .mesh import AXES, Axis

# The axes that split parameters: a pipeline stage owns whole parameters, and the other axes
# replicate them.
SHARD_AXES: tuple[Axis, ...] = ("expert", "tensor")

# A rank, or a number of ranks: that of the tensor axis, or those of every axis by name.
PerAxis = int | Mapping[Axis, int]

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True)
class AxisSplit:
    """How one dimension of a tensor is split over the ranks of one mesh axis.

    Of n units, rank r of t holds those from ceil(r n / t) to ceil((r + 1) n / t), so ranks differ
    by at most one unit and the first rank holds the most. No row is on two ranks.

    Attributes:
        dim: The dimension that is split (a negative number counts from the end).
        axis: The mesh axis that splits it, one of `SHARD_AXES`.
        groups: Sizes of the groups of rows that are stacked along `dim`, each of which is split
            separately, e.g. the three groups of a fused QKV weight. `Shard` replaces an empty tuple
            by one group of the whole length.
        unit: Each rank's part of a group is a whole number of units, e.g. of head sizes. The
            exception are shared key-value groups.
        pad_multiple: 0 means no padding, and at most as many ranks as units. m > 0 is for
            vocabularies and gated MLPs: every rank holds ceil(n / t) rows, rounded up to a multiple
            of m, and the rows after the last true row are zeros.
        shared_kv_groups: Numbers of the groups that are key or value heads of grouped queries. Each
            of their heads (units) serves several query heads, which are the widest group. If the
            number of ranks does not divide the key-value heads, ranks share them: each holds an
            equal part of the group's rows, without regard to heads, and computes with the whole
            heads of its query heads.
    """

    dim: int
    axis: Axis = "tensor"
    groups: tuple[int, ...] = ()
    unit: int = 1
    pad_multiple: int = 0
    shared_kv_groups: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """The full length of the dimension, without padding."""
        return sum(self.groups)

    @property
    def largest_size(self) -> int | None:
        """The largest number of ranks that can split the dimension; None if any number can."""
        if self.pad_multiple or not self.length:
            return None
        return min(
            width // self.unit
            for number, width in enumerate(self.groups)
            if number not in self.shared_kv_groups
        )

    def find_exchanged_groups(self, size: int) -> list[int]:
        """Returns the numbers of the groups whose rows `size` ranks must lend one another.

        They are the shared key-value groups whose heads the ranks cannot divide among themselves.
        """
        return [group for group in self.shared_kv_groups if self.groups[group] // self.unit % size]

    def local_length(self, ranges: Sequence[Range], size: int) -> int:
        """Returns the length of a rank's part that has these ranges, including padding."""
        if self.pad_multiple:
            return self._pad(size)
        return sum(stop - start for start, stop in ranges)

    def ranges(self, rank: int, size: int) -> list[Range]:
        """Returns the ranges along `dim` that a rank holds: see `Shard.ranges`."""
        if self.pad_multiple:
            local = self._pad(size)
            return [(min(rank * local, self.length), min((rank + 1) * local, self.length))]
        exchanged = self.find_exchanged_groups(size)
        held: list[Range] = []
        for number, width in enumerate(self.groups):
            unit = 1 if number in exchanged else self.unit
            start = find_first_unit(width // unit, rank, size) * unit
            stop = find_first_unit(width // unit, rank + 1, size) * unit
            held.append((start, stop))
        return self._offset(held)

    def compute_ranges(self, rank: int, size: int) -> list[Range]:
        """Returns the ranges along `dim` that a rank computes with: see `Shard.compute_ranges`."""
        ranges = self.ranges(rank, size)
        exchanged = self.find_exchanged_groups(size)
        if not exchanged:
            return ranges
        offsets = list(accumulate(self.groups, initial=0))
        query_heads = max(self.groups) // self.unit
        first_query = find_first_unit(query_heads, rank, size)
        last_query = find_first_unit(query_heads, rank + 1, size)
        for number in exchanged:
            queries_per_kv = max(self.groups) // self.groups[number]
            start = first_query // queries_per_kv * self.unit
            stop = -(-last_query // queries_per_kv) * self.unit
            ranges[number] = (offsets[number] + start, offsets[number] + stop)
        return ranges

    def describe_rows(self) -> str:
        """Returns what is split, for messages, such as "14 + 2 + 2 units of 64 rows"."""
        counts = " + ".join(str(width // self.unit) for width in self.groups)
        return f"{counts} units of {self.unit} rows" if self.unit > 1 else f"{counts} rows"

    def complete(self, shape: tuple[int, ...]) -> AxisSplit:
        """Returns the same split with a dimension counted from the start, and all groups.

        Raises:
            ValueError: It cannot be a split of a tensor of this shape.
        """
        if self.axis not in SHARD_AXES:
            raise ValueError(
                f"parameters are split over {' or '.join(SHARD_AXES)}, not over {self.axis!r}"
            )
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(f"dim {self.dim} is outside a tensor of shape {shape}")
        dim = self.dim % len(shape)
        groups = tuple(self.groups) or (shape[dim],)
        if self.groups and (sum(groups) != shape[dim] or min(groups) < 1):
            raise ValueError(
                f"groups {groups} must be > 0 and add up to {shape[dim]}, dim {dim} of {shape}"
            )
        if self.pad_multiple < 0 or self.unit < 1:
            raise ValueError(
                f"pad_multiple {self.pad_multiple} must be >= 0 and unit {self.unit} >= 1"
            )
        if self.pad_multiple and (len(groups) > 1 or self.unit > 1):
            raise ValueError("pad_multiple needs a single block and unit 1; drop groups and unit")
        for width in groups:
            if width % self.unit:
                raise ValueError(
                    f"a block of {width} rows is not a whole number of units of {self.unit}"
                )
        shared = tuple(sorted(set(self.shared_kv_groups)))
        for number in shared:
            if not 0 <= number < len(groups):
                raise ValueError(f"shared_kv_groups {shared} must be numbers of groups {groups}")
            if groups[number] >= max(groups) or max(groups) % groups[number]:
                raise ValueError(
                    f"shared key-value group {number} of {groups[number]} rows must be narrower "
                    f"than the {max(groups)} rows of the query heads, and divide them"
                )
        return replace(self, dim=dim, groups=groups, shared_kv_groups=shared)

    def to_record(self) -> dict[str, Any]:
        """Returns the attributes in values of JSON."""
        return {
            "dim": self.dim,
            "axis": self.axis,
            "groups": list(self.groups),
            "unit": self.unit,
            "pad_multiple": self.pad_multiple,
            "shared_kv_groups": list(self.shared_kv_groups),
        }

    def _pad(self, size: int) -> int:
        """Returns the rows that each of `size` ranks holds of a padded dimension."""
        return -(-self.length // size // self.pad_multiple) * self.pad_multiple

    def _offset(self, ranges: Sequence[Range]) -> list[Range]:
        """Returns ranges along `dim`, from one range within each group."""
        offsets = accumulate(self.groups, initial=0)
        return [
            (offset + start, offset + stop)
            for offset, (start, stop) in zip(offsets, ranges, strict=False)
        ]


@dataclass(frozen=True, init=False)
class Shard:
    """The split of a full tensor: of one dimension over one mesh axis, or of two over two axes.

        Shard((768, 768), 0, groups=(256, 256, 256), unit=64)  # fused QKV, over the tensor axis

        Shard.from_splits(  # stacked experts [E, F, H]
            (8, 512, 256), AxisSplit(0, axis="expert"), AxisSplit(1, axis="tensor")
        )

        Shard.from_splits(  # experts that are stacked in rows [E F, H]
            (8 * 512, 256),
            AxisSplit(0, axis="expert", unit=512),
            AxisSplit(0, axis="tensor", groups=(512,) * 8),
        )

    In the last one both axes split the same dimension: the expert axis deals whole units, and the
    tensor axis splits each group of rows among the ranks that hold it. Such a shard is *nested*.

    Methods take `rank` and `size` along the tensor axis as numbers, or along all axes by name, such
    as `ParallelMesh.ranks` and `ParallelMesh.sizes`. A shard that is not split over the tensor axis
    alone needs the latter, and raises ValueError for numbers. So does everything that knows the
    tensor axis only (`dim`, `groups`, …), which therefore refuses such a shard. The exception are
    nested shards: to numbers they answer as if the expert axis had one rank, as it has in files.

    Attributes:
        shape: The full shape, without padding.
        splits: A split for each dimension that is split, in the order of `SHARD_AXES`.
        tied_to: The name of the parameter that has the same values, or None.
    """

    shape: tuple[int, ...]
    splits: tuple[AxisSplit, ...]
    tied_to: str | None

    def __init__(
        self,
        shape: Sequence[int],
        dim: int,
        groups: Sequence[int] = (),
        unit: int = 1,
        pad_multiple: int = 0,
        tied_to: str | None = None,
        *,
        axis: Axis = "tensor",
        shared_kv_groups: Sequence[int] = (),
    ) -> None:
        """Declares a split of one dimension; the arguments are the attributes of `AxisSplit`."""
        split = AxisSplit(dim, axis, tuple(groups), unit, pad_multiple, tuple(shared_kv_groups))
        self._set(shape, (split,), tied_to)

    @classmethod
    def from_splits(
        cls, shape: Sequence[int], *splits: AxisSplit, tied_to: str | None = None
    ) -> Shard:
        """Declares a split of one or two dimensions."""
        shard = cls.__new__(cls)
        shard._set(shape, splits, tied_to)
        return shard

    def _set(self, shape: Sequence[int], splits: Sequence[AxisSplit], tied_to: str | None) -> None:
        shape = tuple(shape)
        complete = [split.complete(shape) for split in splits]
        complete.sort(key=lambda split: AXES.index(split.axis))
        axes = {split.axis for split in complete}
        dims = {split.dim for split in complete}
        is_nested = len(complete) == 2 and len(axes) == 2 and len(dims) == 1
        if is_nested:
            _check_nested(*complete)
        elif not complete or len(axes) < len(complete) or len(dims) < len(complete):
            found = [(split.dim, split.axis) for split in complete]
            raise ValueError(
                f"a tensor needs splits of different dimensions over different axes, not {found}"
            )
        set_field = object.__setattr__  # a frozen dataclass sets its own fields this way
        set_field(self, "shape", shape)
        set_field(self, "splits", tuple(complete))
        set_field(self, "tied_to", tied_to)

    @property
    def is_nested(self) -> bool:
        """Whether the expert and the tensor axis split the same dimension."""
        return len(self.splits) == 2 and self.splits[0].dim == self.splits[1].dim

    @property
    def splits_experts(self) -> bool:
        """Whether the expert axis splits this tensor."""
        return any(split.axis == "expert" for split in self.splits)

    # What follows is for shards that the tensor axis alone splits, and for nested ones.

    @property
    def tensor_split(self) -> AxisSplit:
        """The only split, which is over the tensor axis, or that of a nested shard. Raises
        ValueError for other shards.
        """
        if self.is_nested:
            return self.splits[1]
        if not self._is_split_over_tensor_alone:
            axes = " and ".join(split.axis for split in self.splits)
            raise ValueError(
                f"a tensor of shape {self.shape} is split over {axes}, which cannot be answered "
                "for the tensor axis alone; give ranks and sizes by axis, or do not split it so"
            )
        return self.splits[0]

    @property
    def dim(self) -> int:
        return self.tensor_split.dim

    @property
    def groups(self) -> tuple[int, ...]:
        """The sizes of the groups; one if the dimension is not a stack."""
        return self.tensor_split.groups

    @property
    def unit(self) -> int:
        return self.tensor_split.unit

    @property
    def pad_multiple(self) -> int:
        return self.tensor_split.pad_multiple

    @property
    def shared_kv_groups(self) -> tuple[int, ...]:
        return self.tensor_split.shared_kv_groups

    @property
    def largest_size(self) -> int | None:
        """The largest number of ranks that can split this tensor; None if any number can."""
        return self.tensor_split.largest_size

    def find_exchanged_groups(self, size: int) -> list[int]:
        """Returns the numbers of the groups whose rows `size` ranks must lend one another."""
        return self.tensor_split.find_exchanged_groups(size)

    def check_even(self, size: int) -> None:
        """Checks that all ranks hold equal parts without padding.

        Raises:
            ValueError: They do not; the message names the sizes that work.
        """
        split = self.tensor_split
        counts = [width // split.unit for width in split.groups]
        if size < 1 or any(count % size for count in counts):
            sizes = describe_sizes(divisors(gcd(*counts))) if any(counts) else "1"
            raise ValueError(
                f"{self._describe_rows(split)} cannot be split {size} ways evenly; use {sizes}"
            )

    def without_padding(self) -> Shard:
        """Returns the same split without padding."""
        if self.is_nested:
            return self
        split = replace(self.tensor_split, pad_multiple=0)
        return Shard.from_splits(self.shape, split, tied_to=self.tied_to)

    # What follows is for all shards.

    def check(self, size: PerAxis) -> None:
        """Checks that this tensor can be split over so many ranks.

        Raises:
            ValueError: It cannot; the message names the sizes that work.
        """
        for split in self.splits:
            self._check_size(split, self._get(size, split, 1))

    def local_shape(self, rank: PerAxis, size: PerAxis) -> tuple[int, ...]:
        """Returns the shape that a rank holds, including padding. Rank 0 holds the most."""
        shape = [*self.shape]
        if self.is_nested:
            dim = self.tensor_split.dim
            shape[dim] = sum(stop - start for start, stop in self._nested_ranges(rank, size))
            return tuple(shape)
        for split in self.splits:
            place = self._locate(split, rank, size)
            shape[split.dim] = split.local_length(split.ranges(*place), place[1])
        return tuple(shape)

    def compute_shape(self, rank: PerAxis, size: PerAxis) -> tuple[int, ...]:
        """Returns the shape that a rank computes with: padding and lent rows included."""
        if self.is_nested:
            return self.local_shape(rank, size)
        shape = [*self.shape]
        for split in self.splits:
            place = self._locate(split, rank, size)
            shape[split.dim] = split.local_length(split.compute_ranges(*place), place[1])
        return tuple(shape)

    def ranges(self, rank: PerAxis, size: PerAxis, dim: int | None = None) -> list[Range]:
        """Returns the [start, stop) ranges of the full tensor that a rank holds along a dimension.

        There is one range for each group, in order. Ranges exclude padding, so the range of a rank
        that holds only padding is empty.

        Args:
            dim: The dimension; it may be left out if only one is split.
        """
        if self.is_nested:
            return self._nested_ranges(rank, size)
        split = self._find_split(dim)
        return split.ranges(*self._locate(split, rank, size))

    def compute_ranges(self, rank: PerAxis, size: PerAxis, dim: int | None = None) -> list[Range]:
        """Returns the ranges that a rank computes with along a dimension.

        They are those of `ranges`, except for key-value heads that the ranks share.
        """
        if self.is_nested:
            return self._nested_ranges(rank, size)
        split = self._find_split(dim)
        return split.compute_ranges(*self._locate(split, rank, size))

    def slice(self, full: Tensor, rank: PerAxis, size: PerAxis) -> Tensor:
        """Returns a rank's part of `full` as a new contiguous tensor; padding rows are zeros."""
        if tuple(full.shape) != self.shape:
            raise ValueError(
                f"expected the full tensor of shape {self.shape}, got {tuple(full.shape)}"
            )
        if self.is_nested:
            ranges = self._nested_ranges(rank, size)
            dim = self.tensor_split.dim
            return torch.cat([full.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        part = full
        for split in self.splits:
            part = self._slice_along(split, part, *self._locate(split, rank, size))
        return part

    def merge(self, parts: Sequence[Tensor], size: PerAxis | None = None) -> Tensor:
        """Returns the full tensor, without padding, from all ranks' parts. It inverts `slice`
        exactly.

        Args:
            parts: In rank order; the rank along the tensor axis varies fastest.
            size: The sizes of the axes; it may be left out if the tensor axis alone splits.
        """
        sizes = len(parts) if size is None else size
        if self.is_nested:
            return self._merge_nested(parts, sizes)
        for split in reversed(self.splits):
            count = self._get(sizes, split)
            parts = [
                self._merge_along(split, parts[first : first + count])
                for first in range(0, len(parts), count)
            ]
        if len(parts) != 1 or tuple(parts[0].shape) != self.shape:
            raise ValueError(f"the parts are not those of one tensor of shape {self.shape}")
        return parts[0]

    def describe(self) -> str:
        """Returns one line for a layer's `extra_repr`."""
        notes = ["x".join(map(str, self.shape))]
        for split in self.splits:
            notes.append(f"split along {split.dim}")
            if split.axis != "tensor":
                notes.append(f"over {split.axis}")
            if len(split.groups) > 1:
                notes.append(f"in blocks {'+'.join(map(str, split.groups))}")
            if split.shared_kv_groups:
                numbers = ", ".join(map(str, split.shared_kv_groups))
                notes.append(f"with shared key-value heads in blocks {numbers}")
            if split.unit > 1:
                notes.append(f"in units of {split.unit}")
            if split.pad_multiple:
                notes.append(f"padded to multiples of {split.pad_multiple}")
        if self.tied_to:
            notes.append(f"tied to {self.tied_to}")
        return " ".join(notes)

    # Manifests record shards.

    def to_record(self) -> dict[str, Any]:
        """Returns the shard as a manifest records it, in values of JSON.

        A split over the tensor axis alone is recorded as it always was, and a nested one like it,
        because files know the tensor axis only. The shared key-value groups
        are recorded only where `infer_shared_kv_groups` would find others.
        """
        if not self._is_split_over_tensor_alone and not self.is_nested:
            return {
                "shape": list(self.shape),
                "splits": [split.to_record() for split in self.splits],
                "tied_to": self.tied_to,
            }
        split = self.tensor_split
        record: dict[str, Any] = {
            "shape": list(self.shape),
            "dim": split.dim,
            "groups": list(split.groups) if len(split.groups) > 1 else [],
            "unit": split.unit,
            "pad_multiple": split.pad_multiple,
            "tied_to": self.tied_to,
        }
        if split.shared_kv_groups != infer_shared_kv_groups(split.groups):
            record["shared_kv_groups"] = list(split.shared_kv_groups)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Shard:
        """Returns the shard that `to_record`, of this or an earlier release, recorded.

        Raises:
            ValueError, TypeError: The record is damaged.
        """
        fields = dict(record)
        if "splits" in fields:
            splits = [AxisSplit(**split) for split in fields.pop("splits")]
            return cls.from_splits(fields.pop("shape"), *splits, **fields)
        fields.setdefault("shared_kv_groups", infer_shared_kv_groups(fields.get("groups", ())))
        return cls(**fields)

    @property
    def _is_split_over_tensor_alone(self) -> bool:
        return [split.axis for split in self.splits] == ["tensor"]

    def _get(self, values: PerAxis, split: AxisSplit, of_experts: int = 0) -> int:
        """Returns the rank or the size along the axis of a split.

        Args:
            of_experts: What a number means for the expert axis of a nested shard.
        """
        if not isinstance(values, int):
            return values[split.axis]
        if self.tensor_split is split:  # which raises for shards that are not nested
            return values
        return of_experts

    def _locate(self, split: AxisSplit, rank: PerAxis, size: PerAxis) -> tuple[int, int]:
        """Returns rank and size along the axis of a split, after checking them."""
        count = self._get(size, split, 1)
        number = self._get(rank, split)
        self._check_size(split, count)
        if not 0 <= number < count:
            raise ValueError(f"rank {number} is outside 0..{count - 1}")
        return number, count

    def _check_size(self, split: AxisSplit, size: int) -> None:
        largest = split.largest_size
        if size < 1 or (largest is not None and size > largest):
            raise ValueError(
                f"{self._describe_rows(split)} cannot be split {size} ways; "
                f"use 1 to {largest or 'any number of'} ranks"
            )

    def _describe_rows(self, split: AxisSplit) -> str:
        return f"{split.describe_rows()} (dim {split.dim} of {self.shape})"

    def _find_split(self, dim: int | None) -> AxisSplit:
        """Returns the split of a dimension, or the only one."""
        found = [
            split for split in self.splits if dim is None or split.dim == dim % len(self.shape)
        ]
        if len(found) == 1:
            return found[0]
        dims = describe_sizes([split.dim for split in self.splits])
        raise ValueError(f"dim {dim} of a tensor of shape {self.shape} is not split; use {dims}")

    def _nested_ranges(self, rank: PerAxis, size: PerAxis) -> list[Range]:
        """Returns the ranges that a rank of both axes holds of a nested shard."""
        over_experts, over_tensor = self.splits
        [(first, last)] = over_experts.ranges(*self._locate(over_experts, rank, size))
        found: list[Range] = []
        start_of_group = 0
        ranges = over_tensor.ranges(*self._locate(over_tensor, rank, size))
        for span, width in zip(ranges, over_tensor.groups, strict=True):
            if first <= start_of_group < last:
                found.append(span)
            start_of_group += width
        return found

    def _merge_nested(self, parts: Sequence[Tensor], sizes: PerAxis) -> Tensor:
        """Returns the tensor that the parts of a nested shard form."""
        over_experts, over_tensor = self.splits
        experts = self._get(sizes, over_experts, 1)
        tensors = self._get(sizes, over_tensor)
        if len(parts) != experts * tensors:
            raise ValueError(f"{len(parts)} parts are not those of {experts} x {tensors} ranks")
        dim = over_tensor.dim
        full = parts[0].new_empty(self.shape)
        counts: dict[Axis, int] = {"expert": experts, "tensor": tensors}
        for number, part in enumerate(parts):
            ranks: dict[Axis, int] = {"expert": number // tensors, "tensor": number % tensors}
            expected = self.local_shape(ranks, counts)
            if tuple(part.shape) != expected or part.dtype != full.dtype:
                raise ValueError(
                    f"part {number} is {part.dtype} {tuple(part.shape)}; "
                    f"expected {full.dtype} {expected}"
                )
            offset = 0
            for start, stop in self._nested_ranges(ranks, counts):
                rows = part.narrow(dim, offset, stop - start)
                full.narrow(dim, start, stop - start).copy_(rows)
                offset += stop - start
        return full

    @staticmethod
    def _slice_along(split: AxisSplit, full: Tensor, rank: int, size: int) -> Tensor:
        """Returns a rank's part along the dimension of one split."""
        ranges = split.ranges(rank, size)
        shape = [*full.shape]
        shape[split.dim] = split.local_length(ranges, size)
        part = torch.zeros(shape, dtype=full.dtype, device=full.device)
        offset = 0
        for start, stop in ranges:
            rows = full.narrow(split.dim, start, stop - start)
            part.narrow(split.dim, offset, stop - start).copy_(rows)
            offset += stop - start
        return part

    @staticmethod
    def _merge_along(split: AxisSplit, parts: Sequence[Tensor]) -> Tensor:
        """Returns the tensor that the parts along the dimension of one split form."""
        size = len(parts)
        shape = [*parts[0].shape]
        shape[split.dim] = split.length
        full = parts[0].new_empty(shape)
        for rank, part in enumerate(parts):
            ranges = split.ranges(rank, size)
            expected = [*shape]
            expected[split.dim] = split.local_length(ranges, size)
            if [*part.shape] != expected or part.dtype != full.dtype:
                raise ValueError(
                    f"part {rank} is {part.dtype} {tuple(part.shape)}; "
                    f"expected {full.dtype} {tuple(expected)}"
                )
            offset = 0
            for start, stop in ranges:
                rows = part.narrow(split.dim, offset, stop - start)
                full.narrow(split.dim, start, stop - start).copy_(rows)
                offset += stop - start
        return full


def _check_nested(over_experts: AxisSplit, over_tensor: AxisSplit) -> None:
    """Raises ValueError unless whole groups of the tensor axis form the units of the expert axis."""
    unit = over_experts.unit
    starts = list(accumulate(over_tensor.groups, initial=0))
    edges = range(0, over_experts.length + 1, unit)
    is_plain = not over_tensor.pad_multiple and not over_tensor.shared_kv_groups
    if len(over_experts.groups) > 1 or not is_plain or not set(edges) <= set(starts):
        raise ValueError(
            "a tensor needs splits of different dimensions over different axes, or an expert axis "
            f"that deals whole groups of the tensor axis; units of {unit} rows are not whole groups "
            f"of {over_tensor.groups}"
        )


def infer_shared_kv_groups(groups: Sequence[int]) -> tuple[int, ...]:
    """Returns the groups that ranks share according to manifests that do not say so.

    Earlier releases took every group for shared key-value heads that is narrower than the widest
    group and divides it.
    """
    widest = max(groups, default=0)
    return tuple(
        number for number, width in enumerate(groups) if width < widest and widest % width == 0
    )
