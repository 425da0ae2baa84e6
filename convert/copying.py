"""Copies a tensor from where the source stores it to where the target wants it.

`run_copy` copies one parameter, in blocks of bounded size. There are two ways:

- By rows (`_copy_rows`). The parameter is seen as rows. Every stored tensor is read once, in the
  order of its bytes, so that its hash is computed on the way. A matrix that is split along its
  columns is read in contiguous bands of rows, which are divided in memory.
- By tiles (`_copy_tiles`), if the source is stored transposed, or in chunks that hold only a part
  of both dimensions. Tiles of the source are read for each band of the target, and turned in
  memory.

Elements travel as unsigned integers of their size, so that no bit changes. Only a conversion to
another type, or the addition of LoRA weights, looks at them as numbers. These, and tiles that are
turned, need torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..checkpoint.dtypes import item_size, torch_name
from ..checkpoint.file_io import (
    HashingReader,
    OpenFiles,
    TensorSink,
    check_hash,
    hash_stored,
    read_into,
    read_pieces,
)
from ..checkpoint.layout import LowRankUpdate, ParameterPlacement, TensorSlice
from ..checkpoint.stored_tensor import StoredTensor
from ..files.working_copies import OpenFile

if TYPE_CHECKING:
    from torch import Tensor

SinkFactory = Callable[[Sequence[StoredTensor]], TensorSink]
Digests = dict[tuple[Path, str], str]  # (file, tensor name) -> sha256


@dataclass(frozen=True)
class TensorCopy:
    """One full tensor to copy.

    Attributes:
        name: The native name of a parameter, or the name of an extra tensor.
        source: Where it is stored.
        target: Where it will be stored.
        updates: Low-rank updates that are added on the way. They are computed and added in fp64, in
            an order that does not depend on how the tensor is divided into blocks, and the sum is
            rounded to the target's type.
    """

    name: str
    source: ParameterPlacement
    target: ParameterPlacement
    updates: tuple[LowRankUpdate, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(part.tensor.nbytes for part in self.target.slices())


def run_copy(
    copy: TensorCopy,
    files: OpenFiles,
    hashes: Mapping[tuple[Path, str], str],
    make_sink: SinkFactory,
    block_bytes: int,
) -> Digests:
    """Copies one parameter.

    Args:
        copy: What to copy.
        files: The source's files.
        hashes: (file, tensor name) -> recorded sha256 of the source tensors.
        make_sink: Makes the sink for target tensors with equal contents.
        block_bytes: Bytes of the largest block.

    Returns:
        The sha256 of every target tensor.

    Raises:
        ValueError: A source tensor does not match its hash, or copies of the parameter differ.
    """
    source = copy.source
    target = copy.target
    product = None
    if copy.updates:
        product = _LowRankProduct.from_updates(copy.updates, source.shape, files)

    # Rows are numbered as they are written, which is in the order of the target's bytes.
    if not target.is_ascending:
        order: list[tuple[int, int]] = []
        for part in target.copies[0]:
            order += [(start, stop) for start, stop in part.ranges if start < stop]
        if product is not None:
            product = product.renumber(source.dim, order)
        source = source.renumber(order)
        target = target.renumber(order)
    # What cannot be read in the order of its bytes then is hashed before.
    if not source.is_ascending:
        _check_hashes(source, files, hashes, block_bytes)
        hashes = {}
    if all(part.transposed for part in target.slices()):
        source = _transpose(source)
        target = _transpose(target)
        if product is not None:
            product = product.transpose()
    conversion = _Conversion(source.dtype, target.dtype, copy.name, product)

    # Target tensors with equal contents, such as the ranks' copies of a norm, share a sink.
    equal_parts: dict[tuple, list[TensorSlice]] = {}
    for part in target.slices():
        equal_parts.setdefault((part.ranges, part.tensor.shape), []).append(part)
    sinks: list[tuple[TensorSlice, TensorSink]] = []
    for parts in equal_parts.values():
        sinks.append((parts[0], make_sink([part.tensor for part in parts])))

    if any(part.transposed or part.across for part in source.slices()):
        _copy_tiles(source, target, sinks, files, hashes, block_bytes, conversion)
    else:
        _copy_rows(source, target, sinks, files, hashes, block_bytes, conversion)

    digests: Digests = {}
    for _, sink in sinks:
        digest = sink.finish()
        for tensor in sink.tensors:
            digests[tensor.file, tensor.name] = digest
    return digests


def _check_hashes(
    source: ParameterPlacement,
    files: OpenFiles,
    hashes: Mapping[tuple[Path, str], str],
    block_bytes: int,
) -> None:
    """Checks the recorded hashes of tensors that will not be read in the order of their bytes."""
    for part in source.copies[0]:
        tensor = part.tensor
        recorded = hashes.get((tensor.file, tensor.name))
        if recorded:
            check_hash(tensor, hash_stored(tensor, files[tensor.file], block_bytes), recorded)


def _transpose(placement: ParameterPlacement) -> ParameterPlacement:
    """Returns the same placement, described as that of the transposed parameter."""
    copies = []
    for copy in placement.copies:
        copies.append(tuple(replace(part, transposed=not part.transposed) for part in copy))
    return ParameterPlacement(
        placement.name, placement.shape[::-1], 1 - placement.dim, tuple(copies)
    )


# ----------------------------------------------------------------------------------------- by rows


class _Block(NamedTuple):
    """A block of a parameter that is seen as rows: whole rows, or a part of one row."""

    first_row: int
    end_row: int
    start: int  # element of the row
    stop: int


@dataclass(frozen=True)
class _RowView:
    """A parameter seen as rows, so that each stored tensor holds the same ranges of every row.

    Attributes:
        count: The number of rows: of all indices before the parameter's dimension.
        length: Elements of a row.
        inner: Elements for each index along the parameter's dimension.
    """

    count: int
    length: int
    inner: int

    @classmethod
    def from_placement(cls, placement: ParameterPlacement) -> _RowView:
        dim = placement.dim
        inner = prod(placement.shape[dim + 1 :])
        return cls(prod(placement.shape[:dim]), placement.shape[dim] * inner, inner)

    def blocks(self, itemsize: int, block_bytes: int) -> Iterator[_Block]:
        """Yields the blocks of at most `block_bytes`, in the order of their bytes."""
        if self.length == 0:
            return
        rows = block_bytes // (self.length * itemsize)
        if self.count > 1 and rows:
            for row in range(0, self.count, rows):
                yield _Block(row, min(row + rows, self.count), 0, self.length)
        else:
            elements = max(1, block_bytes // itemsize)
            for row in range(self.count):
                for start in range(0, self.length, elements):
                    yield _Block(row, row + 1, start, min(start + elements, self.length))


@dataclass(frozen=True)
class _RowSegments:
    """Which elements of each row of a parameter one stored tensor holds.

    Attributes:
        segments: (start, stop) in the parameter's row, and the position in the tensor's row.
        width: Elements of a row of the tensor.
    """

    segments: tuple[tuple[int, int, int], ...]
    width: int

    @classmethod
    def from_slice(cls, part: TensorSlice, rows: _RowView, dim: int) -> _RowSegments:
        inner = rows.inner
        length = rows.length // inner if inner else 0
        segments = []
        for start, stop, position in part.intersect(0, length):
            segments.append((start * inner, stop * inner, position * inner))
        return cls(tuple(segments), part.shape()[dim] * inner)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields the segments' intersections with [start, stop) of a row."""
        for first, last, position in self.segments:
            low = max(first, start)
            high = min(last, stop)
            if low < high:
                yield low, high, position + low - first

    def are_whole(self, rows: _RowView) -> bool:
        """Returns whether the tensor has the parameter's rows as they are."""
        return self.width == rows.length and self.segments == ((0, rows.length, 0),)


def _copy_rows(
    source: ParameterPlacement,
    target: ParameterPlacement,
    sinks: list[tuple[TensorSlice, TensorSink]],
    files: OpenFiles,
    hashes: Mapping[tuple[Path, str], str],
    block_bytes: int,
    conversion: _Conversion,
) -> None:
    """Copies block after block: reads it from the source's tensors, converts it, divides it."""
    rows = _RowView.from_placement(source)
    copies: list[list[tuple[_RowSegments, HashingReader]]] = []
    for number, parts in enumerate(source.copies):
        readers = []
        for part in parts:
            # The other copies are compared byte by byte with the first one, so only that one's
            # hash is checked.
            recorded = None
            if number == 0:
                recorded = hashes.get((part.tensor.file, part.tensor.name))
            reader = HashingReader(part.tensor, files[part.tensor.file], recorded)
            readers.append((_RowSegments.from_slice(part, rows, source.dim), reader))
        copies.append(readers)
    targets = [(_RowSegments.from_slice(part, rows, target.dim), sink) for part, sink in sinks]

    source_itemsize = item_size(source.dtype)
    target_itemsize = item_size(target.dtype)
    for block in rows.blocks(max(source_itemsize, target_itemsize), block_bytes):
        values = _gather_block(block, rows, copies[0], source_itemsize)
        for other in copies[1:]:
            if not np.array_equal(values, _gather_block(block, rows, other, source_itemsize)):
                raise ValueError(
                    f"{other[0][1].tensor} differs from {copies[0][0][1].tensor}; "
                    f"both must be equal"
                )
        values = conversion.convert_block(values, block, rows, source.dim)
        _scatter_block(block, rows, values, targets, target_itemsize)
    for _, reader in copies[0]:
        reader.finish()


def _gather_block(
    block: _Block, rows: _RowView, readers: list[tuple[_RowSegments, HashingReader]], itemsize: int
) -> np.ndarray:
    """Reads a block from all tensors that store the parameter.

    Returns:
        [rows, elements] of the full parameter, as unsigned integers.
    """
    count = block.end_row - block.first_row
    values = np.empty((count, block.stop - block.start), f"u{itemsize}")
    for segments, reader in readers:
        origin = block.first_row * segments.width
        if count == 1:
            for low, high, position in segments.within(block.start, block.stop):
                destination = values[0, low - block.start : high - block.start]
                reader.read((origin + position) * itemsize, destination)
        elif segments.are_whole(rows):
            reader.read(origin * itemsize, values)
        elif segments.segments:
            band = np.empty((count, segments.width), values.dtype)
            reader.read(origin * itemsize, band)
            for low, high, position in segments.segments:
                values[:, low:high] = band[:, position : position + high - low]
    return values


def _scatter_block(
    block: _Block,
    rows: _RowView,
    values: np.ndarray,
    targets: list[tuple[_RowSegments, TensorSink]],
    itemsize: int,
) -> None:
    """Writes a block to all tensors that shall store a part of it."""
    count = block.end_row - block.first_row
    for segments, sink in targets:
        origin = block.first_row * segments.width
        if count == 1:
            for low, high, position in segments.within(block.start, block.stop):
                own = values[0, low - block.start : high - block.start]
                sink.write((origin + position) * itemsize, own)
        elif segments.are_whole(rows):
            sink.write(origin * itemsize, values)
        elif segments.segments:
            band = np.zeros((count, segments.width), values.dtype)
            for low, high, position in segments.segments:
                band[:, position : position + high - low] = values[:, low:high]
            sink.write(origin * itemsize, band)


# ---------------------------------------------------------------------------------------- by tiles


def _copy_tiles(
    source: ParameterPlacement,
    target: ParameterPlacement,
    sinks: list[tuple[TensorSlice, TensorSink]],
    files: OpenFiles,
    hashes: Mapping[tuple[Path, str], str],
    block_bytes: int,
    conversion: _Conversion,
) -> None:
    """Copies a matrix whose source is transposed, or holds only a part of both dimensions.

    The sinks' tensors are stored in the orientation of `target.shape`. They are written in bands of
    rows, and for each band the tiles of the source are read. The source is therefore not read in
    the order of its bytes, so its recorded hashes are checked first.
    """
    _check_hashes(source, files, hashes, block_bytes)
    source_itemsize = item_size(source.dtype)
    target_itemsize = item_size(target.dtype)
    for part, sink in sinks:
        height, width = part.shape()
        row_bytes = width * max(target_itemsize, source_itemsize)
        step = max(1, block_bytes // max(1, row_bytes))
        for top in range(0, height, step):
            bottom = min(top + step, height)
            read_band = partial(
                _read_band,
                target=part,
                dim=target.dim,
                extent=(top, bottom, width),
                dtype=source.dtype,
                files=files,
                block_bytes=block_bytes,
            )
            band = read_band(source.copies[0])
            for other in source.copies[1:]:
                if not np.array_equal(band, read_band(other)):
                    first = source.copies[0][0].tensor
                    raise ValueError(f"{other[0].tensor} differs from {first}; both must be equal")
            band = conversion.convert_band(band, part, target.dim, top)
            sink.write(top * width * target_itemsize, band)


def _read_band(
    parts: tuple[TensorSlice, ...],
    target: TensorSlice,
    dim: int,
    extent: tuple[int, int, int],
    dtype: str,
    files: OpenFiles,
    block_bytes: int,
) -> np.ndarray:
    """Returns rows [top, bottom) of a target tensor, with zeros as padding.

    Args:
        parts: One copy of the parameter in the source.
        target: What the target tensor holds.
        dim: The dimension of the parameter that is split.
        extent: (top, bottom, width) of the band.
        dtype: The source's type, by safetensors' name.
        files: The source's files.
        block_bytes: Bytes of the largest block.
    """
    top, bottom, width = extent
    band = np.zeros((bottom - top, width), f"u{item_size(dtype)}")
    for part in parts:
        # [low, high) of the other dimension, which is not split, that this tensor adds to the band.
        part_start, part_stop = part.across or (0, part.shape()[1 - dim])
        low = part_start
        high = part_stop
        if dim == 1:
            low = max(low, top)
            high = min(high, bottom)
        if low >= high:
            continue
        others = (low - part_start, high - part_start)  # the same, within the tensor

        # A view of the band whose dimensions are the other one and the split one.
        if dim == 0:
            destination = band.T[low:high]
            window = (top, bottom)
        else:
            destination = band[low - top : high - top]
            window = (0, width)

        for run in _find_runs(target, part, window):
            first = run[0].source
            own = (first, run[-1].source + run[-1].length)
            # The tile has the split dimension as its rows if the tensor is stored so.
            split_comes_first = (dim == 0) != part.transposed
            if split_comes_first:
                tile = _read_tile(part.tensor, files[part.tensor.file], own, others, block_bytes).T
            else:
                tile = _read_tile(part.tensor, files[part.tensor.file], others, own, block_bytes)
            moves = []
            for move in run:
                moves.append(_Move(move.source - first, move.target - window[0], move.length))
            _place_columns(destination, tile, moves)
    return band


class _Move(NamedTuple):
    """What goes from positions of one tensor, or array, to positions of another."""

    source: int
    target: int
    length: int


def _find_runs(
    target: TensorSlice, source: TensorSlice, window: tuple[int, int]
) -> Iterator[list[_Move]]:
    """Yields what both tensors hold in `window` of the target, in runs contiguous in the source."""
    moves: list[_Move] = []
    position = 0  # in the target tensor
    for start, stop in target.ranges:
        for low, high, in_source in source.intersect(start, stop):
            in_target = position + low - start
            skipped = max(0, window[0] - in_target)
            count = min(in_target + high - low, window[1]) - in_target - skipped
            if count > 0:
                moves.append(_Move(in_source + skipped, in_target + skipped, count))
        position += stop - start

    run: list[_Move] = []
    for move in sorted(moves):
        if run and move.source != run[-1].source + run[-1].length:
            yield run
            run = []
        run.append(move)
    if run:
        yield run


def _read_tile(
    tensor: StoredTensor,
    descriptor: OpenFile,
    rows: tuple[int, int],
    columns: tuple[int, int],
    block_bytes: int,
) -> np.ndarray:
    """Returns tensor[rows, columns], as unsigned integers.

    It is read at once if whole rows fit into `block_bytes`, else row by row. A store is asked for as
    many rows at a time as would fit whole, because it sends short gaps between them too.
    """
    itemsize = item_size(tensor.dtype)
    width = tensor.shape[1]
    count = rows[1] - rows[0]
    if count * width * itemsize <= block_bytes or columns == (0, width):
        lines = np.empty((count, width), f"u{itemsize}")
        read_into(tensor, descriptor, rows[0] * width * itemsize, lines)
        return lines[:, columns[0] : columns[1]]
    tile = np.empty((count, columns[1] - columns[0]), f"u{itemsize}")
    rows_at_once = max(1, block_bytes // (width * itemsize))
    for first in range(0, count, rows_at_once):
        pieces: list[tuple[int, np.ndarray]] = []
        for index in range(first, min(first + rows_at_once, count)):
            element = (rows[0] + index) * width + columns[0]
            pieces.append((element * itemsize, tile[index]))
        read_pieces(tensor, descriptor, pieces)
    return tile


# From this mean width on, columns are transposed one move at a time.
WIDE_MOVE = 16


def _place_columns(out: np.ndarray, tile: np.ndarray, moves: Sequence[_Move]) -> None:
    """Copies columns of `tile` to columns of `out`, whose memory may be in any order.

    torch transposes dense matrices several times faster than numpy.
    """
    import torch

    out_by_rows = out.strides[1] == out.itemsize
    tile_by_rows = tile.strides[1] == tile.itemsize
    if out_by_rows != tile_by_rows:
        signed = f"i{out.itemsize}"  # torch has few unsigned types.
        columns = sum(move.length for move in moves)
        if tile_by_rows and out.T.flags.c_contiguous and columns >= WIDE_MOVE * len(moves):
            for move in moves:
                own = tile[:, move.source : move.source + move.length]
                dense = torch.from_numpy(np.ascontiguousarray(own).view(signed))
                destination = out.T[move.target : move.target + move.length]
                torch.from_numpy(destination.view(signed)).copy_(dense.t())
            return
        # Turn the whole tile first, so that both have the same order in memory.
        rows = np.ascontiguousarray(tile if tile_by_rows else tile.T)
        dense = torch.from_numpy(rows.view(signed))
        turned = np.empty(dense.shape[::-1], out.dtype)
        torch.from_numpy(turned.view(signed)).copy_(dense.t())
        tile = turned.T if tile_by_rows else turned
    for move in moves:
        own = tile[:, move.source : move.source + move.length]
        out[:, move.target : move.target + move.length] = own


# ----------------------------------------------------------------------- other types, LoRA weights


@dataclass(frozen=True)
class _LowRankProduct:
    """The low-rank updates of a parameter [rows, columns] as one product, in fp64.

    Attributes:
        left: [rows, r]
        right: [r, columns]
    """

    left: np.ndarray
    right: np.ndarray

    @classmethod
    def from_updates(
        cls, updates: Sequence[LowRankUpdate], shape: tuple[int, ...], files: OpenFiles
    ) -> _LowRankProduct:
        """Reads the factors. `left` is zero outside of the rows of each update."""
        lefts: list[np.ndarray] = []
        rights: list[np.ndarray] = []
        for update in updates:
            first = _read_doubles(update.first, files)
            second = _read_doubles(update.second, files)
            left = np.zeros((shape[0], len(first)))
            left[slice(*update.rows)] = update.scaling * second
            lefts.append(left)
            rights.append(first)
        return cls(np.concatenate(lefts, 1), np.concatenate(rights))

    def transpose(self) -> _LowRankProduct:
        return _LowRankProduct(
            np.ascontiguousarray(self.right.T), np.ascontiguousarray(self.left.T)
        )

    def renumber(self, dim: int, order: Sequence[tuple[int, int]]) -> _LowRankProduct:
        """Returns the product with its rows or columns numbered as `ParameterPlacement.renumber`."""
        index = np.concatenate([np.arange(start, stop) for start, stop in order])
        if dim == 0:
            return _LowRankProduct(self.left[index], self.right)
        return _LowRankProduct(self.left, self.right[:, index])


def _read_doubles(tensor: StoredTensor, files: OpenFiles) -> np.ndarray:
    stored = np.empty(tensor.shape, f"u{item_size(tensor.dtype)}")
    read_into(tensor, files[tensor.file], 0, stored)
    return _view_as_numbers(stored, tensor.dtype).double().numpy()


ELEMENTS_PER_SUM = 1 << 16  # whose updates are computed at a time, in the processor's cache


@dataclass(frozen=True)
class _Conversion:
    """Converts blocks of a parameter to the target's type, and adds the updates.

    Attributes:
        source: Safetensors' name of the source's type.
        target: That of the target's type.
        name: The parameter, for messages.
        product: The updates, or None.
    """

    source: str
    target: str
    name: str
    product: _LowRankProduct | None

    def convert_block(
        self, values: np.ndarray, block: _Block, rows: _RowView, dim: int
    ) -> np.ndarray:
        """Returns a block that `_gather_block` returned, converted."""
        if self.product is None:
            return self._cast(values)
        left = self.product.left
        right = self.product.right
        if dim == 1:
            return self._add_product(
                values, left[block.first_row : block.end_row], right[:, block.start : block.stop]
            )
        # The parameter is one row of the view. Complete the block to whole rows of the matrix.
        first = block.start // rows.inner
        last = -(-block.stop // rows.inner)
        offset = first * rows.inner
        own = slice(block.start - offset, block.stop - offset)
        whole = np.zeros((last - first) * rows.inner, values.dtype)
        whole[own] = values[0]
        matrix = whole.reshape(last - first, -1)
        added = self._add_product(matrix, left[first:last], right)
        return added.reshape(1, -1)[:, own]

    def convert_band(self, band: np.ndarray, part: TensorSlice, dim: int, top: int) -> np.ndarray:
        """Returns rows from `top` on of a target tensor, converted.

        Rows or columns of padding get no update.
        """
        if self.product is None:
            return self._cast(band)
        left = self.product.left
        right = self.product.right
        held = np.concatenate([np.arange(start, stop) for start, stop in part.ranges])
        size = part.shape()[dim]
        if dim == 0:
            padded_left = np.zeros((size, left.shape[1]))
            padded_left[: len(held)] = left[held]
            return self._add_product(band, padded_left[top : top + len(band)], right)
        padded_right = np.zeros((len(right), size))
        padded_right[:, : len(held)] = right[:, held]
        return self._add_product(band, left[top : top + len(band)], padded_right)

    def _cast(self, values: np.ndarray) -> np.ndarray:
        if self.source == self.target:
            return values
        return cast(values, self.source, self.target, self.name)

    def _add_product(self, block: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Returns block + left @ right in the target's type.

        One term is added after another, so no bit depends on the shape of the block.
        """
        import torch

        result = np.empty(block.shape, f"u{item_size(self.target)}")
        right_rows = torch.from_numpy(right)
        step = max(1, ELEMENTS_PER_SUM // max(1, block.shape[1]))
        for start in range(0, len(block), step):
            own = np.ascontiguousarray(block[start : start + step])
            values = _view_as_numbers(own, self.source)
            left_columns = torch.from_numpy(left[start : start + step])
            total = torch.zeros(values.shape, dtype=torch.float64)
            term = torch.empty(values.shape, dtype=torch.float64)
            for number in range(len(right_rows)):
                column = left_columns[:, number, None]
                if bool(column.any()):
                    torch.mul(column, right_rows[number], out=term)
                    total += term
            result[start : start + step] = _store_numbers(
                values, values.double() + total, self.target, self.name
            )
        return result


def cast(block: np.ndarray, source: str, target: str, name: str) -> np.ndarray:
    """Converts elements, as unsigned integers of their size, to another floating-point type.

    Rounds to nearest, ties to even, as torch does.

    Raises:
        ValueError: A finite value would become infinite or NaN; the message names the parameter.
    """
    values = _view_as_numbers(block, source)
    return _store_numbers(values, values, target, name)


def _view_as_numbers(block: np.ndarray, dtype: str) -> Tensor:
    """Returns elements that are given as unsigned integers of their size."""
    import torch

    signed = torch.from_numpy(block.view(f"i{item_size(dtype)}"))
    return signed.view(getattr(torch, torch_name(dtype)))


def _store_numbers(values: Tensor, results: Tensor, target: str, name: str) -> np.ndarray:
    """Returns results in the target's type, as unsigned integers.

    Raises:
        ValueError: The result of a finite value is not finite.
    """
    import torch

    converted = results.to(getattr(torch, torch_name(target)))
    was_finite = torch.isfinite(values.float())
    if not bool((torch.isfinite(converted.float()) | ~was_finite).all()):
        largest = results[was_finite].double().abs().max().item()
        raise ValueError(
            f"{name} has a value of {largest:.6g}, which does not fit {torch_name(target)}"
        )
    size = item_size(target)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return converted.view(signed).numpy().view(f"u{size}")
