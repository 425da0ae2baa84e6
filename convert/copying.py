"""Copies parameters from their source tensors to their target tensors, in blocks of bounded size.

Every stored tensor is read once, in the order of its bytes, so that its hash is computed on the way. A matrix that is
split along its columns is read in contiguous bands of rows, which are divided in memory. Only a transposed source is
read by columns; its tiles are transposed in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..checkpoint.dtypes import item_size, torch_name
from ..checkpoint.file_io import (
    HashingReader,
    OpenFiles,
    TensorSink,
    check_hash,
    hash_stored,
    read_into,
)
from ..checkpoint.layout import LowRankUpdate, ParameterPlacement, TensorSlice
from ..checkpoint.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

OutputFactory = Callable[[Sequence[StoredTensor]], TensorSink]
Digests = dict[tuple[Path, str], str]  # (file, tensor name) -> sha256


@dataclass(frozen=True)
class Copy:
    """One full tensor to copy. `name` is the native name of a parameter, or the name of an extra tensor.

    `updates` are added on the way. They are computed and added in fp64, in an order that does not depend on how the
    tensor is divided into blocks, and the sum is rounded to the target's type.
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
    copy: Copy,
    files: OpenFiles,
    hashes: Mapping[tuple[Path, str], str],
    make_output: OutputFactory,
    chunk: int,
) -> Digests:
    """Copies one parameter and returns the sha256 of every target tensor.

    Raises ValueError if a source tensor does not match its hash, or copies of the parameter differ.

    Args:
        hashes: (file, tensor name) -> recorded sha256 of the source tensors.
        make_output: Makes the output for target tensors with equal contents.
        chunk: Bytes of the largest block.
    """
    source, target = copy.source, copy.target
    product = _Product.of(copy.updates, source.shape, files) if copy.updates else None
    if (
        not target.is_ascending
    ):  # the rows are numbered as they are written, which is in the order of the bytes
        order = [span for part in target.copies[0] for span in part.ranges if span[0] < span[1]]
        source, target = source.renumber(order), target.renumber(order)
        product = product and product.renumber(source.dim, order)
    if not source.is_ascending:
        _check_hashes(source, files, hashes, chunk)
        hashes = {}
    if all(part.transposed for part in target.slices()):
        source, target = _transposed(source), _transposed(target)
        product = product and product.transposed()
    convert = _Conversion(source.dtype, target.dtype, copy.name, product)
    groups: dict[tuple, list[TensorSlice]] = {}
    for part in target.slices():
        groups.setdefault((part.ranges, part.tensor.shape), []).append(part)
    outputs = [
        (parts[0], make_output([part.tensor for part in parts])) for parts in groups.values()
    ]
    if any(part.transposed or part.across for part in source.slices()):
        copy_tiles(source, target, outputs, files, hashes, chunk, convert)
    else:
        _copy_straight(source, target, outputs, files, hashes, chunk, convert)
    digests: Digests = {}
    for _, output in outputs:
        digest = output.finish()
        digests |= {(tensor.file, tensor.name): digest for tensor in output.tensors}
    return digests


def _check_hashes(
    source: ParameterPlacement, files: OpenFiles, hashes: Mapping[tuple[Path, str], str], chunk: int
) -> None:
    """Checks the recorded hashes of tensors that will not be read in the order of their bytes."""
    for part in source.copies[0]:
        if recorded := hashes.get((part.tensor.file, part.tensor.name)):
            check_hash(
                part.tensor, hash_stored(part.tensor, files[part.tensor.file], chunk), recorded
            )


def _transposed(placement: ParameterPlacement) -> ParameterPlacement:
    """Returns the same placement, described as that of the transposed parameter."""
    copies = tuple(
        tuple(replace(part, transposed=not part.transposed) for part in copy)
        for copy in placement.copies
    )
    return ParameterPlacement(placement.name, placement.shape[::-1], 1 - placement.dim, copies)


@dataclass(frozen=True)
class _Rows:
    """A parameter as `count` rows of `length` elements; each stored tensor holds the same ranges of every row."""

    count: int
    length: int
    inner: int  # elements for each index along the parameter's dim

    @classmethod
    def of(cls, placement: ParameterPlacement) -> _Rows:
        before, behind = placement.shape[: placement.dim], placement.shape[placement.dim + 1 :]
        return cls(prod(before), placement.shape[placement.dim] * prod(behind), prod(behind))

    def blocks(self, itemsize: int, chunk: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields (first row, end row, first element, end element) of several whole rows, or of a piece of one row."""
        if self.length == 0:
            return
        band = chunk // (self.length * itemsize)
        if self.count > 1 and band:
            for row in range(0, self.count, band):
                yield row, min(row + band, self.count), 0, self.length
        else:
            step = max(1, chunk // itemsize)
            for row in range(self.count):
                for start in range(0, self.length, step):
                    yield row, row + 1, start, min(start + step, self.length)


@dataclass(frozen=True)
class _Slots:
    """Which elements of each row of a parameter one stored tensor holds."""

    pieces: tuple[tuple[int, int, int], ...]  # start, stop, position in the tensor's row
    width: int  # elements of a row of the tensor

    @classmethod
    def of(cls, part: TensorSlice, rows: _Rows, dim: int) -> _Slots:
        length = rows.length // rows.inner if rows.inner else 0
        pieces = tuple(
            (a * rows.inner, b * rows.inner, c * rows.inner)
            for a, b, c in part.intersect(0, length)
        )
        return cls(pieces, part.shape()[dim] * rows.inner)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        for first, last, position in self.pieces:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield low, high, position + low - first

    def is_whole(self, rows: _Rows) -> bool:
        return self.width == rows.length and self.pieces == ((0, rows.length, 0),)


def _copy_straight(
    source: ParameterPlacement,
    target: ParameterPlacement,
    outputs: list[tuple[TensorSlice, TensorSink]],
    files: OpenFiles,
    hashes: Mapping[tuple[Path, str], str],
    chunk: int,
    convert: _Conversion,
) -> None:
    rows = _Rows.of(source)
    copies = []
    for number, parts in enumerate(source.copies):
        inputs = []
        for part in parts:
            # The other copies are compared byte by byte with the first one, so only its hash is checked.
            recorded = hashes.get((part.tensor.file, part.tensor.name)) if number == 0 else None
            opened = HashingReader(part.tensor, files[part.tensor.file], recorded)
            inputs.append((_Slots.of(part, rows, source.dim), opened))
        copies.append(inputs)
    sinks = [(_Slots.of(part, rows, target.dim), output) for part, output in outputs]
    source_item, target_item = item_size(source.dtype), item_size(target.dtype)
    for block in rows.blocks(max(source_item, target_item), chunk):
        full = _gather(block, rows, copies[0], source_item)
        for other in copies[1:]:
            if not np.array_equal(full, _gather(block, rows, other, source_item)):
                raise ValueError(
                    f"{other[0][1].tensor} differs from {copies[0][0][1].tensor}; both must be equal"
                )
        full = convert.block(full, block, rows, source.dim)
        _scatter(block, rows, full, sinks, target_item)
    for _, opened in copies[0]:
        opened.finish()


def _gather(
    block: tuple[int, int, int, int],
    rows: _Rows,
    inputs: list[tuple[_Slots, HashingReader]],
    itemsize: int,
) -> np.ndarray:
    """Returns a block [rows, elements] of the full tensor as unsigned integers, read from all its stored tensors."""
    first, last, start, stop = block
    full = np.empty((last - first, stop - start), f"u{itemsize}")
    for slots, opened in inputs:
        origin = first * slots.width
        if last - first == 1:
            for low, high, position in slots.within(start, stop):
                opened.read((origin + position) * itemsize, full[0, low - start : high - start])
        elif slots.is_whole(rows):
            opened.read(origin * itemsize, full)
        elif slots.pieces:
            band = np.empty((last - first, slots.width), full.dtype)
            opened.read(origin * itemsize, band)
            for low, high, position in slots.pieces:
                full[:, low:high] = band[:, position : position + high - low]
    return full


def _scatter(
    block: tuple[int, int, int, int],
    rows: _Rows,
    full: np.ndarray,
    sinks: list[tuple[_Slots, TensorSink]],
    itemsize: int,
) -> None:
    first, last, start, stop = block
    for slots, output in sinks:
        origin = first * slots.width
        if last - first == 1:
            for low, high, position in slots.within(start, stop):
                output.write((origin + position) * itemsize, full[0, low - start : high - start])
        elif slots.is_whole(rows):
            output.write(origin * itemsize, full)
        elif slots.pieces:
            band = np.zeros((last - first, slots.width), full.dtype)
            for low, high, position in slots.pieces:
                band[:, position : position + high - low] = full[:, low:high]
            output.write(origin * itemsize, band)


@dataclass(frozen=True)
class _Product:
    """The low-rank updates of a parameter [rows, columns] as one product, left @ right, in fp64."""

    left: np.ndarray
    right: np.ndarray

    @classmethod
    def of(
        cls, updates: Sequence[LowRankUpdate], shape: tuple[int, ...], files: OpenFiles
    ) -> _Product:
        """Reads the factors. The columns of `left` are zero outside of the rows of their update."""
        lefts: list[np.ndarray] = []
        rights: list[np.ndarray] = []
        for update in updates:
            first, second = (
                _read_doubles(tensor, files) for tensor in (update.first, update.second)
            )
            lefts.append(np.zeros((shape[0], len(first))))
            lefts[-1][slice(*update.rows)] = update.scaling * second
            rights.append(first)
        return cls(np.concatenate(lefts, 1), np.concatenate(rights))

    def transposed(self) -> _Product:
        return _Product(np.ascontiguousarray(self.right.T), np.ascontiguousarray(self.left.T))

    def renumber(self, dim: int, order: Sequence[tuple[int, int]]) -> _Product:
        index = np.concatenate([np.arange(start, stop) for start, stop in order])
        return (
            _Product(self.left[index], self.right)
            if dim == 0
            else _Product(self.left, self.right[:, index])
        )


def _read_doubles(tensor: StoredTensor, files: OpenFiles) -> np.ndarray:
    stored = np.empty(tensor.shape, f"u{item_size(tensor.dtype)}")
    read_into(tensor, files[tensor.file], 0, stored)
    return _values(stored, tensor.dtype).double().numpy()


@dataclass(frozen=True)
class _Conversion:
    """Converts blocks of a parameter to the target's type, and adds the updates."""

    source: str
    target: str
    name: str
    product: _Product | None

    def block(
        self, full: np.ndarray, block: tuple[int, int, int, int], rows: _Rows, dim: int
    ) -> np.ndarray:
        """Returns a block that `_gather` returned, converted."""
        if self.product is None:
            return (
                full
                if self.source == self.target
                else cast(full, self.source, self.target, self.name)
            )
        first, last, start, stop = block
        if dim == 1:
            return self._added(
                full, self.product.left[first:last], self.product.right[:, start:stop]
            )
        low, high = start // rows.inner, -(-stop // rows.inner)
        whole = np.zeros((high - low) * rows.inner, full.dtype)
        place = slice(start - low * rows.inner, stop - low * rows.inner)
        whole[place] = full[0]
        added = self._added(
            whole.reshape(high - low, -1), self.product.left[low:high], self.product.right
        )
        return added.reshape(1, -1)[:, place]

    def band(self, band: np.ndarray, part: TensorSlice, dim: int, top: int) -> np.ndarray:
        """Returns rows from `top` on of a target tensor, converted. Rows or columns of padding get no update."""
        if self.product is None:
            return (
                band
                if self.source == self.target
                else cast(band, self.source, self.target, self.name)
            )
        held = np.concatenate([np.arange(start, stop) for start, stop in part.ranges])
        left, right = self.product.left, self.product.right
        size = part.shape()[dim]
        if dim == 0:
            padded = np.zeros((size, left.shape[1]))
            padded[: len(held)] = left[held]
            return self._added(band, padded[top : top + len(band)], right)
        wide = np.zeros((len(right), size))
        wide[:, : len(held)] = right[:, held]
        return self._added(band, left[top : top + len(band)], wide)

    def _added(self, block: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Returns block + left @ right. One term follows another, so no bit depends on the shape of the block."""
        import torch

        result = np.empty(block.shape, f"u{item_size(self.target)}")
        columns = torch.from_numpy(right)
        step = max(1, PIECE // max(1, block.shape[1]))
        for start in range(0, len(block), step):
            values = _values(np.ascontiguousarray(block[start : start + step]), self.source)
            factors = torch.from_numpy(left[start : start + step])
            total, term = (
                torch.zeros(values.shape, dtype=torch.float64),
                torch.empty(values.shape, dtype=torch.float64),
            )
            for number in range(len(columns)):
                if bool(factors[:, number].any()):
                    total += torch.mul(factors[:, number, None], columns[number], out=term)
            result[start : start + step] = _stored(
                values, values.double() + total, self.target, self.name
            )
        return result


PIECE = 1 << 16  # elements whose updates are computed at a time, in the processor's cache


def cast(block: np.ndarray, source: str, target: str, name: str) -> np.ndarray:
    """Converts elements, as unsigned integers of their size, from one floating-point type to another.

    Rounds to nearest, ties to even, as torch does. Raises ValueError, naming the parameter, if a finite value would
    become infinite or NaN.
    """
    values = _values(block, source)
    return _stored(values, values, target, name)


def _values(block: np.ndarray, dtype: str) -> Tensor:
    """Returns elements that are given as unsigned integers of their size."""
    import torch

    return torch.from_numpy(block.view(f"i{item_size(dtype)}")).view(
        getattr(torch, torch_name(dtype))
    )


def _stored(values: Tensor, results: Tensor, target: str, name: str) -> np.ndarray:
    """Returns results in the target's type, as unsigned integers. ValueError if one of a finite value is not finite."""
    import torch

    converted = results.to(getattr(torch, torch_name(target)))
    finite = torch.isfinite(values.float())
    if not bool((torch.isfinite(converted.float()) | ~finite).all()):
        largest = results[finite].double().abs().max().item()
        raise ValueError(
            f"{name} has a value of {largest:.6g}, which does not fit {torch_name(target)}"
        )
    size = item_size(target)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return converted.view(signed).numpy().view(f"u{size}")


def copy_tiles(
    source: ParameterPlacement,
    target: ParameterPlacement,
    outputs: list[tuple[TensorSlice, TensorSink]],
    files: OpenFiles,
    hashes: Mapping[tuple[Path, str], str],
    chunk: int,
    convert: _Conversion,
) -> None:
    """Fills the outputs, which are stored in the orientation of `target.shape`, from 2-D source tensors that are
    transposed, or that hold only a part of both dimensions.

    Targets are written in bands of rows, and for each band the tiles of the source are read. Sources are therefore not
    read in the order of their bytes, so their recorded hashes are checked first.
    """
    _check_hashes(source, files, hashes, chunk)
    itemsize = item_size(target.dtype)
    for part, output in outputs:
        height, width = part.tensor.shape if not part.transposed else part.tensor.shape[::-1]
        step = max(1, chunk // max(1, width * max(itemsize, item_size(source.dtype))))
        for top in range(0, height, step):
            bottom = min(top + step, height)
            band = _band(
                source.copies[0], part, target.dim, (top, bottom, width), source.dtype, files, chunk
            )
            for copy in source.copies[1:]:
                other = _band(
                    copy, part, target.dim, (top, bottom, width), source.dtype, files, chunk
                )
                if not np.array_equal(band, other):
                    first = source.copies[0][0].tensor
                    raise ValueError(f"{copy[0].tensor} differs from {first}; both must be equal")
            band = convert.band(band, part, target.dim, top)
            output.write(top * width * itemsize, band)


def _band(
    parts: tuple[TensorSlice, ...],
    target: TensorSlice,
    dim: int,
    extent: tuple[int, int, int],
    dtype: str,
    files: OpenFiles,
    chunk: int,
) -> np.ndarray:
    """Returns rows [top, bottom) of the target tensor, with zeros as padding; `extent` is (top, bottom, width)."""
    top, bottom, width = extent
    band = np.zeros((bottom - top, width), f"u{item_size(dtype)}")
    for part in parts:
        low, high = part.across or (0, part.shape()[1 - dim])
        if dim == 1:
            low, high = max(low, top), min(high, bottom)
        if low >= high:
            continue
        skipped = low - part.across[0] if part.across else low if dim == 1 else 0
        others = (skipped, skipped + high - low)  # of the tensor, along its other dimension
        place = (
            band.T[low:high] if dim == 0 else band[low - top : high - top]
        )  # [other dimension, dim]
        for run in _runs(target, part, (top, bottom) if dim == 0 else (0, width)):
            own = (run[0][0], run[-1][0] + run[-1][2])
            extents = (own, others) if (dim == 0) != part.transposed else (others, own)
            tile = _read_tile(part.tensor, files[part.tensor.file], *extents, chunk)
            tile = tile.T if (dim == 0) != part.transposed else tile
            moves = [
                (there - own[0], here - (top if dim == 0 else 0), count)
                for there, here, count in run
            ]
            _place(place, tile, moves)
    return band


def _runs(
    target: TensorSlice, source: TensorSlice, window: tuple[int, int]
) -> Iterator[list[tuple[int, int, int]]]:
    """Yields what both tensors hold in `window` of the target, in runs that are contiguous in the source.

    A run consists of (position in the source, position in the target, count).
    """
    pieces: list[tuple[int, int, int]] = []
    position = 0
    for start, stop in target.ranges:
        for low, high, there in source.intersect(start, stop):
            here = position + low - start
            skipped = max(0, window[0] - here)
            if (count := min(here + high - low, window[1]) - here - skipped) > 0:
                pieces.append((there + skipped, here + skipped, count))
        position += stop - start
    run: list[tuple[int, int, int]] = []
    for piece in sorted(pieces):
        if run and piece[0] != run[-1][0] + run[-1][2]:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _read_tile(
    tensor: StoredTensor,
    descriptor: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    chunk: int,
) -> np.ndarray:
    """Returns tensor[rows, columns], by one contiguous read if whole rows fit into `chunk`, else by one per row."""
    itemsize, width = item_size(tensor.dtype), tensor.shape[1]
    count, first = rows[1] - rows[0], columns[0]
    if count * width * itemsize <= chunk or columns == (0, width):
        lines = np.empty((count, width), f"u{itemsize}")
        read_into(tensor, descriptor, rows[0] * width * itemsize, lines)
        return lines[:, columns[0] : columns[1]]
    tile = np.empty((count, columns[1] - columns[0]), f"u{itemsize}")
    for index in range(count):
        read_into(tensor, descriptor, ((rows[0] + index) * width + first) * itemsize, tile[index])
    return tile


def _place(out: np.ndarray, tile: np.ndarray, moves: Sequence[tuple[int, int, int]]) -> None:
    """Copies columns of `tile` to columns of `out`, whose memory may be in any order.

    Each move is (first column of the tile, first column of `out`, count). torch transposes dense matrices several times
    faster than numpy.
    """
    import torch

    out_by_rows, tile_by_rows = (array.strides[1] == array.itemsize for array in (out, tile))
    if out_by_rows != tile_by_rows:
        signed = f"i{out.itemsize}"
        if (
            tile_by_rows
            and out.T.flags.c_contiguous
            and sum(count for *_, count in moves) >= 16 * len(moves)
        ):
            for start, at, count in moves:
                dense = torch.from_numpy(
                    np.ascontiguousarray(tile[:, start : start + count]).view(signed)
                )
                torch.from_numpy(out.T[at : at + count].view(signed)).copy_(dense.t())
            return
        dense = torch.from_numpy(
            np.ascontiguousarray(tile if tile_by_rows else tile.T).view(signed)
        )
        turned = np.empty(dense.shape[::-1], out.dtype)
        torch.from_numpy(turned.view(signed)).copy_(dense.t())
        tile = turned.T if tile_by_rows else turned
    for start, at, count in moves:
        out[:, at : at + count] = tile[:, start : start + count]
