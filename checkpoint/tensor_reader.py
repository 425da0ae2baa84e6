"""Reads stored tensors, or a rank's parts of them.

No other bytes are read, and at most a few megabytes at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..files.working_copies import open_for_reading
from .dtypes import item_size, torch_name
from .file_io import OpenFiles, check_hash, hash_stored, read_into, read_pieces
from .layout import ParameterPlacement
from .safetensors_header import read_header
from .stored_tensor import StoredTensor

CHUNK_BYTES = 8 << 20


class TensorReader:
    """Opens each file once, until its context ends.

    The chunks that it returns are views of one buffer, and valid only until the next read.
    """

    def __init__(self) -> None:
        self._files = OpenFiles(open_for_reading)
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._held: dict[StoredTensor, Tensor] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._files.__exit__(*exception)

    def hold(self, values: Mapping[StoredTensor, Tensor]) -> None:
        """Gives the values of tensors that are in memory, which `chunks` and `fill` then take, in
        the place of those that were given before.
        """
        self._held = dict(values)

    def chunks(
        self, tensor: StoredTensor, dim: int, start: int, stop: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields [start, stop) along `dim` of a tensor, in chunks along dimension 0.

        Args:
            tensor: A tensor of one or two dimensions.
            dim: 0 or 1.
            start: The first index along `dim`.
            stop: The end along `dim`.

        Yields:
            The chunk's rows in the result, and the chunk, in the stored type.
        """
        if tensor in self._held:
            yield slice(0, None), self._held[tensor].narrow(dim, start, stop - start)
            return
        itemsize = item_size(tensor.dtype)
        if dim == 0:
            row_length = prod(tensor.shape[1:])
            step = max(1, CHUNK_BYTES // (max(row_length, 1) * itemsize))
            for first in range(start, stop, step):
                last = min(first + step, stop)
                chunk = self._view_buffer(tensor, last - first, *tensor.shape[1:])
                self._read(tensor, first * row_length, chunk)
                yield slice(first - start, last - start), chunk
        else:
            rows, columns = tensor.shape
            step = max(1, CHUNK_BYTES // (max(stop - start, 1) * itemsize))
            for first in range(0, rows, step):
                last = min(first + step, rows)
                chunk = self._view_buffer(tensor, last - first, stop - start)
                pieces = [
                    ((row * columns + start) * itemsize, _view_bytes(chunk[row - first]))
                    for row in range(first, last)
                ]
                self._files.open([tensor.file])
                read_pieces(tensor, self._files[tensor.file], pieces)
                yield slice(first, last), chunk

    def flat(self, tensor: StoredTensor, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) of the flattened tensor, with shape [stop - start]."""
        values = self._view_buffer(tensor, stop - start)
        self._read(tensor, start, values)
        return values

    def whole(self, tensor: StoredTensor) -> Tensor:
        """Returns the whole tensor, in memory that it does not share with the buffer."""
        values = torch.empty(tensor.shape, dtype=torch_dtype(tensor))
        self._read(tensor, 0, values)
        return values

    def fill(
        self, placement: ParameterPlacement, ranges: Iterable[tuple[int, int]], into: Tensor
    ) -> None:
        """Copies a rank's part of a parameter, and fills the vocabulary padding with zeros.

        Args:
            placement: Where the parameter is stored.
            ranges: What the rank holds along the parameter's dimension.
            into: The rank's part.
        """
        dim = placement.dim
        filled = 0
        for part, start, stop, position in placement.find_slices(ranges):
            destination = into.narrow(dim, position, stop - start)
            if part.across is not None:
                first, last = part.across
                destination = destination.narrow(1 - dim, first, last - first)
            stored_dim = dim
            if part.transposed:
                destination = destination.t()
                stored_dim = 1 - dim
            for rows, chunk in self.chunks(part.tensor, stored_dim, start, stop):
                destination[rows].copy_(chunk)
            filled = max(filled, position + stop - start)
        length = into.shape[dim]
        if filled < length:
            into.narrow(dim, filled, length - filled).zero_()

    def _view_buffer(self, tensor: StoredTensor, *shape: int) -> Tensor:
        """Returns the buffer as a tensor of this shape.

        A single row may be larger than the buffer; it gets new memory.
        """
        dtype = torch_dtype(tensor)
        nbytes = prod(shape) * dtype.itemsize
        buffer = self._buffer
        if nbytes > CHUNK_BYTES:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes].view(dtype).view(shape)

    def _read(self, tensor: StoredTensor, element: int, into: Tensor) -> None:
        """Fills the contiguous `into` with the tensor's elements from number `element` on."""
        self._files.open([tensor.file])
        start = element * item_size(tensor.dtype)
        read_into(tensor, self._files[tensor.file], start, _view_bytes(into))


def _view_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def torch_dtype(tensor: StoredTensor) -> torch.dtype:
    return getattr(torch, torch_name(tensor.dtype))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor without copying them."""
    return _view_bytes(tensor).data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a small safetensors file."""
    with TensorReader() as reader:
        return {tensor.name: reader.whole(tensor) for tensor in read_header(path)[0]}


def check_digests(
    tensors: Sequence[StoredTensor],
    digests: Mapping[tuple[Path, str], str],
    rank: int = 0,
    size: int = 1,
) -> None:
    """Checks one rank's share of the tensors against their recorded digests.

    Each rank checks a contiguous share of about equal size. Tensors without a recorded digest are
    skipped.

    Args:
        tensors: The tensors in the order of their bytes, the same on every rank.
        digests: (file, tensor name) -> recorded sha256.
        rank: The rank that checks.
        size: The number of ranks.

    Raises:
        ValueError: A digest does not match.
    """
    recorded: list[StoredTensor] = []
    for tensor in tensors:
        if (tensor.file, tensor.name) in digests and tensor.nbytes:
            recorded.append(tensor)

    # A tensor belongs to the rank in whose share its middle byte lies.
    total = sum(tensor.nbytes for tensor in recorded)
    position = 0
    share: list[StoredTensor] = []
    for tensor in recorded:
        if (position + tensor.nbytes // 2) * size // total == rank:
            share.append(tensor)
        position += tensor.nbytes

    threads = max(1, min(4, (os.cpu_count() or 1) // size))
    with OpenFiles(open_for_reading) as files, ThreadPoolExecutor(threads) as pool:
        files.open([tensor.file for tensor in share])
        descriptors = [files[tensor.file] for tensor in share]
        found = pool.map(hash_stored, share, descriptors, repeat(CHUNK_BYTES // 8))
        for tensor, digest in zip(share, found, strict=True):
            check_hash(tensor, digest, digests[tensor.file, tensor.name])
