"""Copies of matrices that are stored transposed or in a grid of chunks, in blocks of every size, against numpy."""

from __future__ import annotations

import os

import numpy as np
import pytest

from shardzoo.checkpoint.layout import ParameterPlacement, TensorSlice
from shardzoo.checkpoint.stored_tensor import StoredTensor
from shardzoo.convert.copying import TensorCopy, run_copy

HEIGHT, WIDTH = 22, 36  # of the parameter


class Collected:
    """A sink that keeps what is written."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.content = bytearray(tensors[0].nbytes)

    def write(self, offset, values):
        written = np.ascontiguousarray(values).tobytes()
        self.content[offset : offset + len(written)] = written

    def finish(self):
        return "digest"


def store(folder, name, part):
    """Returns the stored tensor of an array, alone in a file."""
    path = folder / name
    path.write_bytes(np.ascontiguousarray(part).tobytes())
    return StoredTensor(name, path, "F32", part.shape, 0)


def place_source(folder, whole, dim, transposed, columns, prefix):
    """One copy: two tensors along `dim`, each cut along the other dimension at `columns`."""
    length = whole.shape[dim]
    parts = []
    for start, stop in ((0, length // 3), (length // 3, length)):
        for low, high in columns:
            own = whole[start:stop] if dim == 0 else whole[:, start:stop]
            if low is not None:
                own = own[:, low:high] if dim == 0 else own[low:high]
            stored = own.T if transposed else own
            tensor = store(folder, f"{prefix}-{start}-{low}", stored)
            across = None if low is None else (low, high)
            parts.append(TensorSlice(tensor, ((start, stop),), transposed, across))
    return tuple(parts)


def copy_matrix(folder, dim, transposed, columns, target_transposed, block, second=None):
    """Returns what is written of a matrix, and what should be, for two ranks."""
    folder.mkdir(exist_ok=True)
    whole = np.arange(HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
    copies = [place_source(folder, whole, dim, transposed, columns, "first")]
    if second is not None:
        copies.append(place_source(folder, second, dim, transposed, columns, "second"))
    source = ParameterPlacement("w", whole.shape, dim, tuple(copies))
    source.check()
    half = whole.shape[dim] // 2
    targets = []
    wanted = []
    for rank in range(2):
        own = np.take(whole, range(rank * half, rank * half + half), dim)
        stored = own.T if target_transposed else own
        tensor = StoredTensor(f"rank{rank}", folder / f"out{rank}", "F32", stored.shape, 0)
        ranges = ((rank * half, rank * half + half),)
        targets.append(TensorSlice(tensor, ranges, target_transposed))
        wanted.append(np.ascontiguousarray(stored).tobytes())
    target = ParameterPlacement("w", whole.shape, dim, (tuple(targets),))
    sinks = []

    def make_sink(tensors):
        sinks.append(Collected(tensors))
        return sinks[-1]

    files = {
        part.tensor.file: os.open(part.tensor.file, os.O_RDONLY)
        for part in source.slices()
    }  # fmt: skip
    try:
        run_copy(TensorCopy("w", source, target), files, {}, make_sink, block)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return [bytes(sink.content) for sink in sinks], wanted


WHOLE = ((None, None),)


@pytest.mark.parametrize("block", [4, 64, 300, 1 << 20])
@pytest.mark.parametrize("target_transposed", [False, True])
@pytest.mark.parametrize("layout", ["transposed", "grid", "transposed grid", "rows"])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_element_arrives(dim, layout, target_transposed, block, tmp_path):
    columns = WHOLE
    if "grid" in layout:
        other = (HEIGHT, WIDTH)[1 - dim]
        columns = ((0, other // 4), (other // 4, other))
    found, wanted = copy_matrix(
        tmp_path, dim, "transposed" in layout, columns, target_transposed, block
    )
    assert found == wanted


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [WHOLE, ((0, 5), (5, WIDTH))])
def test_copies_that_differ_are_refused(columns, transposed, tmp_path):
    whole = np.arange(HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
    copy_matrix(tmp_path / "equal", 0, transposed, columns, False, 64, whole)
    whole[-1, -1] += 1
    with pytest.raises(ValueError, match=r"second-.* differs from .*first.*both must be equal"):
        copy_matrix(tmp_path / "other", 0, transposed, columns, False, 64, whole)
