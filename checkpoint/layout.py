"""Describes which stored tensors of a folder hold which part of each native parameter.

A native parameter is the full, unsplit, unpadded tensor of a model. Every stored tensor holds some
ranges of it along the dimension of its `Shard`. It may be stored transposed, and it may have
padding after the ranges.

From the model to the file: a `ParameterSpec` says what a parameter is and how ranks split it, a
`TensorSlice` which part of it one stored tensor holds, a `ParameterPlacement` all its slices in one
folder, and a `CheckpointLayout` the placements of all parameters. A conversion compares the layouts
of two folders.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Literal

from .dtypes import item_size
from .stored_tensor import ChunkedTensor, StoredTensor, StridedTensor, WidenedTensor, list_chunks

if TYPE_CHECKING:  # It imports torch, which the processes that only copy bytes do without.
    from ..mpu import ParallelMesh, Shard

# How a rank stores the rows of a fused QKV weight: all of q, k and v; q, k and v of each head; or,
# for each head, the first rows of q, k and v, then the second rows, …
RowOrder = Literal["blocks", "heads", "interleaved"]


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as the model declares it.

    Attributes:
        name: The native name.
        shape: The full shape without padding.
        shard: How ranks split it; None if it is replicated.
        order: The order of the rows of a rank's part; the model's own is "blocks".
        stored_whole: Whether every rank's file has all of the parameter, although the model splits
            it.
        keeps_fp32: Whether it keeps its type when the model is converted to another one.
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard | None
    order: RowOrder = "blocks"
    stored_whole: bool = False
    keeps_fp32: bool = False

    def __post_init__(self) -> None:
        """Refuses a shard that the tensor axis does not split alone; files know no other axis."""
        if self.shard is None:
            return
        try:
            _ = self.shard.tensor_split
        except ValueError as error:
            raise ValueError(f"parameter {self.name}: {error}") from None

    @property
    def dim(self) -> int:
        if self.shard is None:
            return 0
        return self.shard.dim

    def ranges(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Returns the ranges along `dim` that rank `rank` of `size` holds.

        A replicated parameter has one range, its whole length.
        """
        if self.shard is None or self.stored_whole:
            length = self.shape[self.dim] if self.shape else 1
            return ((0, length),)
        return list_stored_ranges(self.shard, rank, size, self.order)

    def list_ranges_on(self, mesh: ParallelMesh | None) -> tuple[tuple[int, int], ...]:
        """Returns the ranges along `dim` that this process holds in memory.

        Unlike a file, it may have a part of the experts.
        """
        if self.shard is None or not self.shard.is_nested or mesh is None:
            rank = 0 if mesh is None else mesh.tp_rank
            return self.ranges(rank, 1 if mesh is None else mesh.tp_size)
        return tuple(self.shard.ranges(mesh.ranks, mesh.sizes))

    def shape_on(self, mesh: ParallelMesh | None) -> tuple[int, ...]:
        """Returns the shape of the part that this process holds in memory."""
        if self.shard is None or not self.shard.is_nested or mesh is None:
            rank = 0 if mesh is None else mesh.tp_rank
            return self.local_shape(rank, 1 if mesh is None else mesh.tp_size)
        return self.shard.local_shape(mesh.ranks, mesh.sizes)

    def local_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Returns the shape of a rank's part.

        Raises:
            ValueError: The parameter cannot be split over `size` ranks; the message names the sizes
                that work.
        """
        if self.shard is None or self.stored_whole:
            return self.shape
        try:
            return self.shard.local_shape(rank, size)
        except ValueError as error:
            raise ValueError(f"parameter {self.name}: {error}") from None

    def even_shape(self, size: int) -> tuple[int, ...]:
        """Returns the shape that every rank has in a format of equal parts.

        Raises:
            ValueError: The parts would be unequal.
        """
        is_cut = self.shard is not None and not self.shard.pad_multiple
        if self.shard is not None and is_cut and not self.stored_whole:
            try:
                self.shard.check_even(size)
            except ValueError as error:
                raise ValueError(f"parameter {self.name}: {error}") from None
        return self.local_shape(0, size)

    def without_padding(self) -> ParameterSpec:
        """Returns the parameter without vocabulary padding, for formats that store none."""
        if self.shard is None:
            return self
        return replace(self, shard=self.shard.without_padding())


@lru_cache(maxsize=4096)  # The layers of a model share their ranges.
def list_stored_ranges(
    shard: Shard, rank: int, size: int, order: RowOrder
) -> tuple[tuple[int, int], ...]:
    """Returns the ranges along the split dimension that a rank stores, in the order of storage.

    With grouped queries, "heads" means the query heads of a group, then its k, then its v, as in
    Megatron-LM.
    """
    blocks = shard.ranges(rank, size)
    if order == "blocks":
        return tuple(blocks)

    # Each block, of q, k or v, is divided among this rank's groups of heads. Of grouped queries,
    # a group has several heads of q and one of k and of v.
    groups = min(stop - start for start, stop in blocks) // shard.unit
    by_group: list[list[tuple[int, int]]] = []  # [group][block]: (start, stop)
    for group in range(groups):
        spans: list[tuple[int, int]] = []
        for start, stop in blocks:
            rows = (stop - start) // groups
            spans.append((start + group * rows, start + (group + 1) * rows))
        by_group.append(spans)
    if order == "heads":
        return tuple(span for spans in by_group for span in spans)

    ranges: list[tuple[int, int]] = []
    for spans in by_group:
        for row in range(shard.unit):
            for start, _ in spans:
                ranges.append((start + row, start + row + 1))
    return tuple(ranges)


@dataclass(frozen=True)
class TensorSlice:
    """The part of a parameter that one stored tensor holds.

    Attributes:
        tensor: The stored tensor.
        ranges: Ranges [start, stop) along the parameter's `dim`, in the order in which `tensor`
            holds them.
        transposed: Whether the tensor is stored with its two dimensions swapped.
        across: The range along the parameter's other dimension that the tensor holds; None if it
            holds all of it.
    """

    tensor: StoredTensor
    ranges: tuple[tuple[int, int], ...]
    transposed: bool = False
    across: tuple[int, int] | None = None

    def shape(self) -> tuple[int, ...]:
        """Returns the stored shape in the parameter's orientation."""
        if self.transposed:
            return self.tensor.shape[::-1]
        return self.tensor.shape

    def intersect(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields what [start, stop) of the parameter shares with this slice.

        Yields:
            (start, stop, position in the tensor) of each common range.
        """
        position = 0
        for first, last in self.ranges:
            low = max(first, start)
            high = min(last, stop)
            if low < high:
                yield low, high, position + low - first
            position += last - first


@dataclass(frozen=True)
class LowRankUpdate:
    """A low-rank update, scaling · B A, of rows of a parameter [out, in], as LoRA trains it.

    Attributes:
        rows: The rows [start, stop) to which it is added.
        scaling: The factor of the product.
        first: A [r, in].
        second: B [stop - start, r].
    """

    rows: tuple[int, int]
    scaling: float
    first: StoredTensor
    second: StoredTensor


@dataclass(frozen=True)
class ParameterPlacement:
    """Where one parameter is stored in a folder.

    Attributes:
        name: The native name.
        shape: The full shape without padding.
        dim: The dimension along which slices divide it.
        copies: Each copy holds all of the parameter, in one or more slices. A replicated parameter
            has a copy for each rank.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    copies: tuple[tuple[TensorSlice, ...], ...]

    def slices(self) -> Iterator[TensorSlice]:
        for copy in self.copies:
            yield from copy

    @property
    def dtype(self) -> str:
        return self.copies[0][0].tensor.dtype

    @property
    def is_ascending(self) -> bool:
        """Whether every stored tensor holds its ranges in the parameter's order."""
        for part in self.slices():
            for first, second in pairwise(part.ranges):
                if first[0] > second[0]:
                    return False
        return True

    def renumber(self, order: Sequence[tuple[int, int]]) -> ParameterPlacement:
        """Returns the placement of the same tensors with the parameter's rows numbered anew.

        Args:
            order: The rows of the new numbering, as ranges of the old one, one after the other.
        """
        new_starts = list(accumulate((stop - start for start, stop in order), initial=0))
        by_old_start = sorted(zip(order, new_starts, strict=False))
        old_starts = [old_start for (old_start, _), _ in by_old_start]

        def renumber_range(start: int, stop: int) -> Iterator[tuple[int, int]]:
            nearest = max(0, bisect_right(old_starts, start) - 1)
            for (old_start, old_stop), new_start in by_old_start[nearest:]:
                if old_start >= stop:
                    break
                low = max(old_start, start)
                high = min(old_stop, stop)
                if low < high:
                    yield new_start + low - old_start, new_start + high - old_start

        copies: list[tuple[TensorSlice, ...]] = []
        for copy in self.copies:
            parts: list[TensorSlice] = []
            for part in copy:
                ranges: list[tuple[int, int]] = []
                for start, stop in part.ranges:
                    ranges += renumber_range(start, stop)
                parts.append(replace(part, ranges=tuple(ranges)))
            copies.append(tuple(parts))
        return replace(self, copies=tuple(copies))

    def find_slices(
        self, ranges: Iterable[tuple[int, int]], copy: int = 0
    ) -> Iterator[tuple[TensorSlice, int, int, int]]:
        """Yields what a rank that holds `ranges` along `dim` must read from one copy.

        Yields:
            (slice, start, stop, position): [start, stop) along the stored tensor's dimension
            belongs at `position` of the rank's part.
        """
        local_start = 0
        for start, stop in ranges:
            for part in self.copies[copy]:
                for low, high, position in part.intersect(start, stop):
                    yield part, position, position + high - low, local_start + low - start
            local_start += stop - start

    def check(self) -> None:
        """Raises ValueError unless every copy covers the parameter exactly once.

        Also refuses tensors of a wrong shape, and of different types.
        """
        for part in self.slices():
            self._check_slice(part)
        for copy in self.copies:
            # Slices that hold the same range along the other dimension form a band.
            bands: dict[tuple[int, int] | None, list[TensorSlice]] = {}
            for part in copy:
                bands.setdefault(part.across, []).append(part)
            for band in bands.values():
                self._check_coverage(band)
            self._check_bands(list(bands), copy)

    def _check_slice(self, part: TensorSlice) -> None:
        first = self.copies[0][0].tensor
        if part.tensor.dtype != self.dtype:
            raise ValueError(
                f"{part.tensor} has type {part.tensor.dtype}, but {first} has type {first.dtype}"
            )
        shape = part.shape()
        expected = [*self.shape]
        # Along `dim` a tensor may have padding after its ranges.
        expected[self.dim] = shape[self.dim] if len(shape) == len(self.shape) else -1
        if part.across is not None:
            expected[1 - self.dim] = part.across[1] - part.across[0]
        width = sum(stop - start for start, stop in part.ranges)
        if list(shape) != expected or expected[self.dim] < width:
            raise ValueError(
                f"{part.tensor} has shape {list(part.tensor.shape)}, which does not fit {self.name}"
            )

    def _check_bands(
        self, bands: list[tuple[int, int] | None], copy: Sequence[TensorSlice]
    ) -> None:
        """Raises ValueError unless the bands follow one another along the other dimension."""
        spans = sorted(band for band in bands if band is not None)
        if not spans:
            return
        folder = copy[0].tensor.file.parent
        starts = [start for start, _ in spans]
        stops = [stop for _, stop in spans]
        if None in bands or starts != [0, *stops[:-1]]:
            raise ValueError(f"the chunks of {self.name} in {folder} are not those of a grid")
        if stops[-1] != self.shape[1 - self.dim]:
            raise ValueError(f"a part of {self.name} is missing in {folder}")

    def _check_coverage(self, band: Sequence[TensorSlice]) -> None:
        """Raises ValueError unless the slices' ranges cover the dimension exactly once."""
        ranges: list[tuple[int, int]] = []
        for part in band:
            ranges += [span for span in part.ranges if span[0] < span[1]]
        position = 0
        for start, stop in sorted(ranges):
            if start != position:
                problem = "stored twice" if start < position else "missing"
                low = min(start, position)
                high = max(start, position)
                files = ", ".join(sorted({str(part.tensor.file) for part in band}))
                raise ValueError(
                    f"[{low}, {high}) of {self.name} (dim {self.dim}) is {problem} in {files}"
                )
            position = stop
        length = self.shape[self.dim]
        if position != length and 0 not in self.shape:
            raise ValueError(f"[{position}, {length}) of {self.name} is not stored in any file")


@dataclass(frozen=True)
class CheckpointLayout:
    """Where one folder stores all tensors.

    Attributes:
        placements: The parameters' placements by native name.
        extras: Tensors that are not parameters.
    """

    placements: Mapping[str, ParameterPlacement]
    extras: Mapping[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])

    def check(self) -> None:
        """Raises ValueError if a parameter is not stored exactly once per copy, or misshapen."""
        for placement in self.placements.values():
            placement.check()

    def tensors(self) -> list[StoredTensor]:
        """Returns every stored tensor once."""
        tensors: dict[StoredTensor, None] = {}
        for placement in self.placements.values():
            for part in placement.slices():
                tensors[part.tensor] = None
        for tensor in self.extras.values():
            tensors[tensor] = None
        return list(tensors)


def place_by_rank(
    parameters: Mapping[str, ParameterSpec], ranks: Sequence[Mapping[str, StoredTensor]]
) -> dict[str, ParameterPlacement]:
    """Returns the placements of parameters that several ranks stored.

    Args:
        parameters: The parameters by native name.
        ranks: Each rank's tensors by native name.
    """
    size = len(ranks)
    placements: dict[str, ParameterPlacement] = {}
    for name, parameter in parameters.items():
        by_rank: list[tuple[TensorSlice, ...]] = []
        for rank in range(size):
            ranges = parameter.ranges(rank, size)
            by_rank.append(slice_tensor(ranks[rank][name], ranges, parameter.dim))
        if parameter.shard is None or parameter.stored_whole:
            copies = tuple(by_rank)
        else:
            copies = (tuple(part for parts in by_rank for part in parts),)
        placements[name] = ParameterPlacement(name, parameter.shape or (1,), parameter.dim, copies)
    return placements


def slice_tensor(
    tensor: StoredTensor, ranges: tuple[tuple[int, int], ...], dim: int, transposed: bool = False
) -> tuple[TensorSlice, ...]:
    """Returns the slice that a tensor is, or that each of its chunks is.

    Args:
        tensor: The stored tensor.
        ranges: What it holds of a parameter along `dim`.
        dim: The dimension of the parameter.
        transposed: Whether it is stored with its two dimensions swapped.

    Raises:
        ValueError: It has several chunks and more than two dimensions.
    """
    if not isinstance(tensor, ChunkedTensor):
        return (TensorSlice(tensor.at_least_1d(), ranges, transposed),)
    if len(tensor.shape) > 2:
        raise ValueError(
            f"{tensor} has several chunks and {len(tensor.shape)} dimensions; at most 2 can be read"
        )
    stored_dim = 1 - dim if transposed else dim
    other_dim = 1 - stored_dim
    parts: list[TensorSlice] = []
    for start, chunk in list_chunks(tensor):
        first = start[stored_dim]
        own = tuple(_cut_ranges(ranges, first, first + chunk.shape[stored_dim]))
        across = None
        if len(start) == 2 and chunk.shape[other_dim] != tensor.shape[other_dim]:
            across = (start[other_dim], start[other_dim] + chunk.shape[other_dim])
        parts.append(TensorSlice(chunk, own, transposed, across))
    return tuple(parts)


def slice_experts(tensor: StoredTensor, rows: int, transposed: bool) -> tuple[TensorSlice, ...]:
    """Returns the slices of a tensor that holds the matrices of all experts, or their vectors.

    Of the parameter [E · rows, columns] it holds [E, rows, columns]; or [E, columns, rows], a slice
    for each expert, if they are transposed.

    Args:
        tensor: The stored tensor.
        rows: The parameter's rows of an expert.
        transposed: Whether each expert's matrix is stored transposed.

    Raises:
        ValueError: The elements of the tensor do not follow one another in the file.
    """
    if isinstance(tensor, (StridedTensor, WidenedTensor)):
        raise ValueError(f"{tensor} is stored as a view of another tensor; save it contiguous")
    parts: list[TensorSlice] = []
    for origin, chunk in list_chunks(tensor):
        shape = chunk.shape[1:]
        if not transposed and shape == tensor.shape[1:]:
            # The experts' rows follow one another in the file as in the parameter.
            flat = replace(chunk, shape=(chunk.shape[0] * rows, *shape[1:]))
            first = origin[0] * rows
            parts.append(TensorSlice(flat, ((first, first + flat.shape[0]),)))
            continue
        row_dim = 1 if transposed else 0
        across: tuple[int, int] | None = None
        if len(shape) == 2 and shape[1 - row_dim] != tensor.shape[2 - row_dim]:
            start = origin[2 - row_dim]
            across = (start, start + shape[1 - row_dim])
        matrix_bytes = prod(shape) * item_size(chunk.dtype)
        for number in range(chunk.shape[0]):
            expert = origin[0] + number
            matrix = replace(
                chunk,
                name=f"{chunk.name}[{expert}]",
                shape=shape,
                offset=chunk.offset + number * matrix_bytes,
            )
            first = expert * rows + origin[1 + row_dim]
            span = (first, first + shape[row_dim])
            parts.append(TensorSlice(matrix, (span,), transposed, across))
    return tuple(parts)


def _cut_ranges(
    ranges: Iterable[tuple[int, int]], first: int, last: int
) -> Iterator[tuple[int, int]]:
    """Yields what positions [first, last) of a tensor hold, which holds `ranges` in a row."""
    position = 0
    for start, stop in ranges:
        low = max(position, first)
        high = min(position + stop - start, last)
        if low < high:
            yield start + low - position, start + high - position
        position += stop - start


def place_whole(name: str, tensor: StoredTensor) -> ParameterPlacement:
    """Returns the placement of a tensor that is no parameter, as one row of elements.

    Raises:
        ValueError: Its chunks are not whole rows.
    """
    row_length = prod(tensor.shape[1:])
    parts: list[TensorSlice] = []
    for start, chunk in list_chunks(tensor):
        if chunk.shape[1:] != tensor.shape[1:]:
            raise ValueError(
                f"{tensor} is not a parameter of the model, and its chunks are not whole rows"
            )
        first = start[0] * row_length if start else 0
        flat = replace(chunk, shape=(chunk.numel,))
        parts.append(TensorSlice(flat, ((first, first + chunk.numel),)))
    return ParameterPlacement(name, (tensor.numel,), 0, (tuple(parts),))


def check_no_overlap(tensors: Sequence[StoredTensor]) -> None:
    """Raises ValueError if two tensors that are about to be written share bytes."""
    spans: list[tuple[str, int, int, str]] = []
    for tensor in tensors:
        spans.append((str(tensor.file), tensor.offset, tensor.offset + tensor.nbytes, tensor.name))
    spans.sort()
    for (file, _, stop, name), (next_file, start, _, next_name) in pairwise(spans):
        if file == next_file and start < stop:
            raise ValueError(f"tensors {name} and {next_name} of {file} would overlap")
