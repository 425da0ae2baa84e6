"""Reads parts of stored tensors, and nothing but those parts, a few megabytes at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from .files import StoredTensor

CHUNK_BYTES = 8 << 20


class TensorReader:
    """Opens each file once; a context manager that closes them. What it returns is valid until its next read."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            os.close(file)

    def chunks(self, tensor: StoredTensor, dim: int, start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """[start, stop) along `dim` (0 or 1) of a tensor of one or two dimensions.

        Yields pieces along dimension 0: where they are in the result, and their values in the stored type.
        """
        if tensor.values is not None:
            yield slice(None), tensor.values.narrow(dim, start, stop - start)
        elif dim == 0:
            row = prod(tensor.shape[1:])
            step = max(1, CHUNK_BYTES // (max(row, 1) * self._dtype(tensor).itemsize))
            for first in range(start, stop, step):
                last = min(first + step, stop)
                chunk = self._empty(tensor, last - first, *tensor.shape[1:])
                self._read(tensor, first * row, chunk)
                yield slice(first - start, last - start), chunk
        else:
            rows, columns = tensor.shape
            step = max(1, CHUNK_BYTES // (max(stop - start, 1) * self._dtype(tensor).itemsize))
            for first in range(0, rows, step):
                last = min(first + step, rows)
                chunk = self._empty(tensor, last - first, stop - start)
                for row in range(first, last):
                    self._read(tensor, row * columns + start, chunk[row - first])
                yield slice(first, last), chunk

    def flat(self, tensor: StoredTensor, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened tensor, as [stop - start]."""
        if tensor.values is not None:
            return tensor.values.flatten()[start:stop]
        values = self._empty(tensor, stop - start)
        self._read(tensor, start, values)
        return values

    def _dtype(self, tensor: StoredTensor) -> torch.dtype:
        if tensor.dtype is None:
            raise ValueError(f"{tensor} is not of floating-point numbers")
        return tensor.dtype

    def _empty(self, tensor: StoredTensor, *shape: int) -> Tensor:
        """The buffer as a tensor of this shape; a buffer of its own for a row that is longer than that."""
        dtype = self._dtype(tensor)
        nbytes = prod(shape) * dtype.itemsize
        buffer = self._buffer if nbytes <= CHUNK_BYTES else torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes].view(dtype).view(shape)

    def _read(self, tensor: StoredTensor, element: int, into: Tensor) -> None:
        """Fills the contiguous `into` with consecutive elements."""
        if tensor.path not in self._files:
            self._files[tensor.path] = os.open(tensor.path, os.O_RDONLY)
        offset = tensor.offset + element * into.element_size()
        view = into.flatten().view(torch.uint8).numpy().data
        while len(view):
            count = os.preadv(self._files[tensor.path], [view], offset)
            if count == 0:
                raise ValueError(f"{tensor} ends too early: the file is truncated")
            view, offset = view[count:], offset + count
