"""Copies a parameter whose source is stored with its dimensions swapped, by tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ..checkpoint.dtypes import item_size
from ..checkpoint.file_io import Files, Output, check_hash, hash_stored, read_into
from ..checkpoint.layout import Part, Placement
from ..checkpoint.stored_tensor import StoredTensor
from .cast import cast


def copy_transposed(
    source: Placement,
    target: Placement,
    outputs: list[tuple[Part, Output]],
    files: Files,
    hashes: Mapping[tuple[Path, str], str],
    chunk: int,
) -> None:
    """Fills the outputs, which are stored as `target.shape` has it, from 2-D parts stored the other way round.

    Targets are written in bands of rows, for each of which the source's columns are read. That passes no source
    in the order of its bytes, so recorded hashes are checked beforehand.
    """
    for part in source.copies[0]:
        if recorded := hashes.get((part.tensor.file, part.tensor.name)):
            check_hash(part.tensor, hash_stored(part.tensor, files[part.tensor.file], chunk), recorded)
    itemsize = item_size(target.dtype)
    for part, output in outputs:
        height, width = part.tensor.shape if not part.transposed else part.tensor.shape[::-1]
        step = max(1, chunk // max(1, width * max(itemsize, item_size(source.dtype))))
        for top in range(0, height, step):
            bottom = min(top + step, height)
            band = _band(source.copies[0], part, target.dim, (top, bottom, width), source.dtype, files, chunk)
            for copy in source.copies[1:]:
                other = _band(copy, part, target.dim, (top, bottom, width), source.dtype, files, chunk)
                if not np.array_equal(band, other):
                    first = source.copies[0][0].tensor
                    raise ValueError(f"{copy[0].tensor} differs from {first}, which it must repeat")
            if source.dtype != target.dtype:
                band = cast(band, source.dtype, target.dtype, source.name)
            output.write(top * width * itemsize, band)


def _band(
    parts: tuple[Part, ...],
    target: Part,
    dim: int,
    extent: tuple[int, int, int],
    dtype: str,
    files: Files,
    chunk: int,
) -> np.ndarray:
    """Rows [top, bottom) of the target's tensor; padding is zero."""
    top, bottom, width = extent
    band = np.zeros((bottom - top, width), f"u{item_size(dtype)}")
    for part in parts:
        descriptor = files[part.tensor.file]
        for count, here, there in _shared(target, part):
            if dim == 0:
                low, high = max(here, top), min(here + count, bottom)
                if low < high:
                    columns = (there + low - here, there + high - here)
                    tile = _read_tile(part.tensor, descriptor, (0, width), columns, chunk)
                    _transpose_into(band[low - top : high - top], tile)
            else:
                tile = _read_tile(part.tensor, descriptor, (there, there + count), (top, bottom), chunk)
                _transpose_into(band[:, here : here + count], tile)
    return band


def _shared(target: Part, source: Part) -> Iterator[tuple[int, int, int]]:
    """(count, position in the target, position in the source) of each range that both hold."""
    position = 0
    for start, stop in target.ranges:
        for low, high, there in source.local(start, stop):
            yield high - low, position + low - start, there
        position += stop - start


def _read_tile(
    tensor: StoredTensor, descriptor: int, rows: tuple[int, int], columns: tuple[int, int], chunk: int
) -> np.ndarray:
    """tensor[rows, columns]: one contiguous read where whole rows fit into `chunk`, else one for each row."""
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


def _transpose_into(out: np.ndarray, tile: np.ndarray) -> None:
    """out = tileᵀ; torch's transposing copy of dense matrices is several times faster than numpy's."""
    import torch

    signed = f"i{out.itemsize}"
    dense = torch.from_numpy(np.ascontiguousarray(tile).view(signed))
    if out.flags.c_contiguous:
        torch.from_numpy(out.view(signed)).copy_(dense.t())
    else:
        out[...] = torch.empty(dense.shape[::-1], dtype=dense.dtype).copy_(dense.t()).numpy().view(out.dtype)
