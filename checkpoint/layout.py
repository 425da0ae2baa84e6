"""Describes which stored tensors of a folder hold which part of each native parameter.

A native parameter is the full, unsplit, unpadded tensor of a model. Every stored tensor holds some ranges of it
along the dimension of its `Shard`. It may be stored transposed, and it may have padding after the ranges.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Literal

from .stored_tensor import ChunkedTensor, StoredTensor, pieces

if TYPE_CHECKING:  # it would import torch, which the processes that only copy bytes do without
    from ..mpu import Shard

# How a rank stores the rows of a fused QKV weight: all of q, k and v; q, k and v of each head; or, for each head, the
# first rows of q, k and v, then the second rows, …
RowOrder = Literal["blocks", "heads", "interleaved"]


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as the model declares it: full shape without padding; `shard` is None if it is replicated.

    `order` is that of the rows of a rank's part; the model's own is "blocks".
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard | None
    order: RowOrder = "blocks"

    def __post_init__(self) -> None:
        """Refuses a shard that the tensor axis does not split alone; files know no other axis."""
        try:
            _ = self.shard and self.shard.tensor_split
        except ValueError as error:
            raise ValueError(f"parameter {self.name}: {error}") from None

    @property
    def dim(self) -> int:
        return self.shard.dim if self.shard else 0

    def ranges(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Returns the ranges along `dim` that rank `rank` of `size` holds; the whole length if replicated."""
        return (
            stored_ranges(self.shard, rank, size, self.order)
            if self.shard
            else ((0, (self.shape or (1,))[0]),)
        )

    def local_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Returns the shape of a rank's part. ValueError, naming the sizes that work, if `size` is not one of them."""
        try:
            return self.shard.local_shape(rank, size) if self.shard else self.shape
        except ValueError as error:
            raise ValueError(f"parameter {self.name}: {error}") from None

    def even_shape(self, size: int) -> tuple[int, ...]:
        """Returns the shape that every rank has in a format of equal parts. ValueError if they would be unequal."""
        try:
            if self.shard and not self.shard.pad_multiple:
                self.shard.check_even(size)
        except ValueError as error:
            raise ValueError(f"parameter {self.name}: {error}") from None
        return self.local_shape(0, size)

    def without_padding(self) -> ParameterSpec:
        """Returns the parameter without vocabulary padding, for formats that store none."""
        return replace(self, shard=self.shard.without_padding()) if self.shard else self


@lru_cache(maxsize=4096)  # the layers of a model share their ranges
def stored_ranges(
    shard: Shard, rank: int, size: int, order: RowOrder
) -> tuple[tuple[int, int], ...]:
    """Returns the ranges along the split dimension that a rank stores, in the order in which it stores them.

    With grouped queries, "heads" means the query heads of a group, then its k, then its v, as in Megatron-LM.
    """
    blocks = shard.ranges(rank, size)
    if order == "blocks":
        return tuple(blocks)
    groups = min(stop - start for start, stop in blocks) // shard.unit  # of heads, on this rank
    steps = [(start, (stop - start) // groups) for start, stop in blocks]
    heads = [(start + group * step, step) for group in range(groups) for start, step in steps]
    if order == "heads":
        return tuple((start, start + step) for start, step in heads)
    count = len(blocks)
    return tuple(
        (start + row, start + row + 1)
        for group in range(groups)
        for row in range(shard.unit)
        for start, _ in heads[group * count : (group + 1) * count]
    )


@dataclass(frozen=True)
class TensorSlice:
    """The part of a parameter that one stored tensor holds.

    Attributes:
        ranges: Ranges [start, stop) along the parameter's `dim`, in the order in which `tensor` holds them.
        transposed: Whether the tensor is stored with its two dimensions swapped.
        across: The range along the parameter's other dimension that the tensor holds; None if it holds all of it.
    """

    tensor: StoredTensor
    ranges: tuple[tuple[int, int], ...]
    transposed: bool = False
    across: tuple[int, int] | None = None

    def shape(self) -> tuple[int, ...]:
        """Returns the stored shape in the parameter's orientation."""
        return self.tensor.shape[::-1] if self.transposed else self.tensor.shape

    def local(self, start: int, stop: int) -> Iterable[tuple[int, int, int]]:
        """Yields what [start, stop) of the parameter shares with this slice: (start, stop, position in the tensor)."""
        position = 0
        for first, last in self.ranges:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield low, high, position + low - first
            position += last - first


@dataclass(frozen=True)
class Update:
    """A low-rank update, scaling · B A, of rows of a parameter [out, in].

    Attributes:
        rows: The rows [start, stop) to which it is added.
        first, second: A [r, in] and B [stop - start, r].
    """

    rows: tuple[int, int]
    scaling: float
    first: StoredTensor
    second: StoredTensor


@dataclass(frozen=True)
class ParameterPlacement:
    """Where one parameter is stored: each copy holds all of it, in one or more slices along `dim`."""

    name: str
    shape: tuple[int, ...]
    dim: int
    copies: tuple[tuple[TensorSlice, ...], ...]

    def slices(self) -> Iterable[TensorSlice]:
        for copy in self.copies:
            yield from copy

    @property
    def dtype(self) -> str:
        return self.copies[0][0].tensor.dtype

    @property
    def is_ascending(self) -> bool:
        """Whether every stored tensor holds its ranges in the parameter's order."""
        return all(
            first[0] <= second[0]
            for part in self.slices()
            for first, second in pairwise(part.ranges)
        )

    def renumbered(self, order: Sequence[tuple[int, int]]) -> ParameterPlacement:
        """Returns the placement of the same tensors along another numbering: these ranges, one after the other."""
        starts = list(accumulate((stop - start for start, stop in order), initial=0))
        known = sorted(zip(order, starts, strict=False))
        beginnings = [old for (old, _), _ in known]

        def renumber(start: int, stop: int) -> Iterator[tuple[int, int]]:
            for (old, end), new in known[max(0, bisect_right(beginnings, start) - 1) :]:
                if old >= stop:
                    break
                low, high = max(old, start), min(end, stop)
                if low < high:
                    yield new + low - old, new + high - old

        def moved(part: TensorSlice) -> TensorSlice:
            return replace(part, ranges=tuple(r for span in part.ranges for r in renumber(*span)))

        return replace(
            self, copies=tuple(tuple(moved(part) for part in copy) for copy in self.copies)
        )

    def wanted(
        self, ranges: Iterable[tuple[int, int]], copy: int = 0
    ) -> Iterator[tuple[TensorSlice, int, int, int]]:
        """Yields what a rank that holds `ranges` along `dim` must read from one copy: (slice, start, stop, position).

        [start, stop) along the tensor's dimension belongs at `position` of the rank's part.
        """
        local = 0
        for start, stop in ranges:
            for part in self.copies[copy]:
                for low, high, position in part.local(start, stop):
                    yield part, position, position + high - low, local + low - start
            local += stop - start

    def check(self) -> None:
        """Raises ValueError unless every copy covers the parameter exactly once with tensors of the right shape."""
        for part in self.slices():
            if part.tensor.dtype != self.dtype:
                first = self.copies[0][0].tensor
                raise ValueError(
                    f"{part.tensor} has type {part.tensor.dtype}, but {first} has type {first.dtype}"
                )
            expected = [*self.shape]
            expected[self.dim] = (
                part.shape()[self.dim] if len(part.shape()) == len(self.shape) else -1
            )
            if part.across is not None:
                expected[1 - self.dim] = part.across[1] - part.across[0]
            width = sum(stop - start for start, stop in part.ranges)
            if list(part.shape()) != expected or expected[self.dim] < width:
                raise ValueError(
                    f"{part.tensor} has shape {list(part.tensor.shape)}, which does not fit {self.name}"
                )
        for copy in self.copies:
            bands: dict[tuple[int, int] | None, list[TensorSlice]] = {}
            for part in copy:
                bands.setdefault(part.across, []).append(part)
            for band in bands.values():
                self._check_coverage(band)
            spans = sorted(band for band in bands if band is not None)
            if spans and (
                None in bands
                or [start for start, _ in spans] != [0, *(stop for _, stop in spans[:-1])]
            ):
                raise ValueError(
                    f"the chunks of {self.name} in {copy[0].tensor.file.parent} are not those of a grid"
                )
            if spans and spans[-1][1] != self.shape[1 - self.dim]:
                raise ValueError(
                    f"a part of {self.name} is missing in {copy[0].tensor.file.parent}"
                )

    def _check_coverage(self, copy: Sequence[TensorSlice]) -> None:
        position = 0
        for start, stop in sorted(r for part in copy for r in part.ranges if r[0] < r[1]):
            if start != position:
                problem = "stored twice" if start < position else "missing"
                low, high = sorted((start, position))
                files = ", ".join(sorted({str(part.tensor.file) for part in copy}))
                raise ValueError(
                    f"[{low}, {high}) of {self.name} (dim {self.dim}) is {problem} in {files}"
                )
            position = stop
        if position != self.shape[self.dim] and 0 not in self.shape:
            raise ValueError(
                f"[{position}, {self.shape[self.dim]}) of {self.name} is not stored in any file"
            )


@dataclass(frozen=True)
class CheckpointLayout:
    """Where one folder stores all parameters, by native name; `extras` are tensors that are not parameters."""

    placements: Mapping[str, ParameterPlacement]
    extras: Mapping[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])

    def check(self) -> None:
        """Raises ValueError if a parameter is not stored exactly once per copy, or with a wrong shape."""
        for placement in self.placements.values():
            placement.check()

    def tensors(self) -> list[StoredTensor]:
        """Returns every stored tensor once."""
        parts = (
            part.tensor for placement in self.placements.values() for part in placement.slices()
        )
        return list(dict.fromkeys([*parts, *self.extras.values()]))


def place_by_rank(
    parameters: Mapping[str, ParameterSpec], ranks: Sequence[Mapping[str, StoredTensor]]
) -> dict[str, ParameterPlacement]:
    """Returns the placements of parameters that several ranks stored, from each rank's tensors by native name."""
    size = len(ranks)
    placements: dict[str, ParameterPlacement] = {}
    for name, parameter in parameters.items():
        parts = [
            slices(ranks[rank][name], parameter.ranges(rank, size), parameter.dim)
            for rank in range(size)
        ]
        copies = (
            (tuple(part for rank in parts for part in rank),) if parameter.shard else tuple(parts)
        )
        placements[name] = ParameterPlacement(name, parameter.shape or (1,), parameter.dim, copies)
    return placements


def slices(
    tensor: StoredTensor, ranges: tuple[tuple[int, int], ...], dim: int, transposed: bool = False
) -> tuple[TensorSlice, ...]:
    """Returns the slice that a tensor is, or that each of its chunks is. It holds `ranges` of a parameter along `dim`.

    Raises ValueError if it has several chunks and more than two dimensions.
    """
    if not isinstance(tensor, ChunkedTensor):
        return (TensorSlice(tensor.at_least_1d(), ranges, transposed),)
    if len(tensor.shape) > 2:
        raise ValueError(
            f"{tensor} has several chunks and {len(tensor.shape)} dimensions; at most 2 can be read"
        )
    along = 1 - dim if transposed else dim
    found: list[TensorSlice] = []
    for start, chunk in pieces(tensor):
        own = tuple(_cut(ranges, start[along], start[along] + chunk.shape[along]))
        across = None
        if len(start) == 2 and chunk.shape[1 - along] != tensor.shape[1 - along]:
            across = (start[1 - along], start[1 - along] + chunk.shape[1 - along])
        found.append(TensorSlice(chunk, own, transposed, across))
    return tuple(found)


def _cut(ranges: Iterable[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yields what positions [first, last) of a tensor hold, if it holds these ranges one after the other."""
    position = 0
    for start, stop in ranges:
        low, high = max(position, first), min(position + stop - start, last)
        if low < high:
            yield start + low - position, start + high - position
        position += stop - start


def place_whole(name: str, tensor: StoredTensor) -> ParameterPlacement:
    """Returns the placement of a tensor that is no parameter, as one row of elements. ValueError if its chunks are not
    whole rows."""
    row = prod(tensor.shape[1:])
    if any(chunk.shape[1:] != tensor.shape[1:] for _, chunk in pieces(tensor)):
        raise ValueError(
            f"{tensor} is not a parameter of the model, and its chunks are not whole rows"
        )
    flat = tuple(
        TensorSlice(
            replace(chunk, shape=(chunk.numel,)),
            ((first := sum(start[:1]) * row, first + chunk.numel),),
        )
        for start, chunk in pieces(tensor)
    )
    return ParameterPlacement(name, (tensor.numel,), 0, (flat,))


def check_no_overlap(tensors: Sequence[StoredTensor]) -> None:
    """Raises ValueError if two tensors that are about to be written share bytes."""
    spans = sorted(
        (str(tensor.file), tensor.offset, tensor.offset + tensor.nbytes, tensor.name)
        for tensor in tensors
    )
    for (file, _, stop, name), (next_file, start, _, next_name) in pairwise(spans):
        if file == next_file and start < stop:
            raise ValueError(f"tensors {name} and {next_name} of {file} would overlap")
