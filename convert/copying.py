"""Moves one parameter from its source tensors to its target tensors, in blocks of bounded size.

Every stored tensor is passed once, in the order of its bytes, so that hashes are computed on the way. A matrix that
is split along its columns is read in contiguous bands of rows, and cut up in memory. Only a transposed source is
read in columns; its tiles are turned in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from ..checkpoint.dtypes import item_size
from ..checkpoint.file_io import Files, Input, Output
from ..checkpoint.layout import Part, Placement
from ..checkpoint.stored_tensor import StoredTensor
from .cast import cast
from .transposing import copy_transposed

OutputFactory = Callable[[Sequence[StoredTensor]], Output]


@dataclass(frozen=True)
class Copy:
    """name: the parameter, or the tensor that is none. Both sides place the same full tensor."""

    name: str
    source: Placement
    target: Placement

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return sum(part.tensor.nbytes for part in self.target.parts())


def run_copy(
    copy: Copy, files: Files, hashes: Mapping[tuple[Path, str], str], make_output: OutputFactory, chunk: int
) -> dict[tuple[Path, str], str]:
    """Copies, and returns the sha256 of every target tensor.

    files: of the sources. hashes: recorded for source tensors. chunk: bytes of the largest block.
    ValueError if a source tensor does not match its hash, or copies of one parameter differ.
    """
    source, target = copy.source, copy.target
    if all(part.transposed for part in target.parts()):
        source, target = _turned(source), _turned(target)
    groups: dict[tuple, list[Part]] = {}
    for part in target.parts():
        groups.setdefault((part.ranges, part.tensor.shape), []).append(part)
    outputs = [(parts[0], make_output([part.tensor for part in parts])) for parts in groups.values()]
    if any(part.transposed for part in source.parts()):
        copy_transposed(source, target, outputs, files, hashes, chunk)
    else:
        _copy_straight(source, target, outputs, files, hashes, chunk)
    digests = {}
    for _, output in outputs:
        digest = output.finish()
        digests |= {(tensor.file, tensor.name): digest for tensor in output.tensors}
    return digests


def _turned(placement: Placement) -> Placement:
    """The same placement, of the transposed parameter."""
    copies = tuple(tuple(replace(part, transposed=not part.transposed) for part in copy) for copy in placement.copies)
    return Placement(placement.name, placement.shape[::-1], 1 - placement.dim, copies)


@dataclass(frozen=True)
class _Rows:
    """A parameter as `count` rows of `length` elements; parts hold ranges of every row."""

    count: int
    length: int
    inner: int  # elements for each index along the parameter's dim

    @classmethod
    def of(cls, placement: Placement) -> _Rows:
        before, behind = placement.shape[: placement.dim], placement.shape[placement.dim + 1 :]
        return cls(prod(before), placement.shape[placement.dim] * prod(behind), prod(behind))

    def blocks(self, itemsize: int, chunk: int) -> Iterator[tuple[int, int, int, int]]:
        """(first row, last row, first element, last element), in order: several whole rows, or a piece of one."""
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
    """A part in elements of a row. width: elements of a row of the tensor."""

    pieces: tuple[tuple[int, int, int], ...]  # start, stop, position in the tensor's row
    width: int

    @classmethod
    def of(cls, part: Part, rows: _Rows, dim: int) -> _Slots:
        length = rows.length // rows.inner if rows.inner else 0
        pieces = tuple((a * rows.inner, b * rows.inner, c * rows.inner) for a, b, c in part.local(0, length))
        return cls(pieces, part.shape()[dim] * rows.inner)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        for first, last, position in self.pieces:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield low, high, position + low - first

    def is_whole(self, rows: _Rows) -> bool:
        return self.width == rows.length and self.pieces == ((0, rows.length, 0),)


def _copy_straight(
    source: Placement,
    target: Placement,
    outputs: list[tuple[Part, Output]],
    files: Files,
    hashes: Mapping[tuple[Path, str], str],
    chunk: int,
) -> None:
    rows = _Rows.of(source)
    copies = []
    for number, parts in enumerate(source.copies):
        inputs = []
        for part in parts:
            # Copies are compared byte by byte with the first one, whose hash is enough.
            recorded = hashes.get((part.tensor.file, part.tensor.name)) if number == 0 else None
            opened = Input(part.tensor, files[part.tensor.file], recorded)
            inputs.append((_Slots.of(part, rows, source.dim), opened))
        copies.append(inputs)
    sinks = [(_Slots.of(part, rows, target.dim), output) for part, output in outputs]
    source_item, target_item = item_size(source.dtype), item_size(target.dtype)
    for block in rows.blocks(max(source_item, target_item), chunk):
        full = _gather(block, rows, copies[0], source_item)
        for other in copies[1:]:
            if not np.array_equal(full, _gather(block, rows, other, source_item)):
                raise ValueError(f"{other[0][1].tensor} differs from {copies[0][0][1].tensor}, which it must repeat")
        if source.dtype != target.dtype:
            full = cast(full, source.dtype, target.dtype, source.name)
        _scatter(block, rows, full, sinks, target_item)
    for _, opened in copies[0]:
        opened.finish()


def _gather(
    block: tuple[int, int, int, int], rows: _Rows, inputs: list[tuple[_Slots, Input]], itemsize: int
) -> np.ndarray:
    """A block of the full tensor [rows, elements] from the parts that hold it, as unsigned integers."""
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
    sinks: list[tuple[_Slots, Output]],
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
