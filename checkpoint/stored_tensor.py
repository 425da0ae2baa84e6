"""Describes a tensor stored in a file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from ..files.working_copies import OpenFile, RangedFile
from .dtypes import item_size

FileState = tuple[int, int]  # bytes of a file, and its modification time in nanoseconds


def read_file_state(file: Path | OpenFile) -> FileState:
    """Returns the state of a file, given its path or opened, to notice a change."""
    if isinstance(file, RangedFile):
        return file.state
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, without its values.

    Attributes:
        name: The name in the file.
        file: The path of the file.
        dtype: The safetensors name of the type.
        shape: The shape as stored, in row-major order.
        offset: The byte of the file at which the values start.
        file_state: The state of the file when its header was read. Bytes that are read later must
            be of the same file. None for a tensor that is still to be written.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    file_state: FileState | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * item_size(self.dtype)

    def at_least_1d(self) -> StoredTensor:
        """Returns the tensor with the shape (1,) instead of ()."""
        if self.shape:
            return self
        return replace(self, shape=(1,))

    def __str__(self) -> str:
        return f"tensor {self.name} in {self.file}"


@dataclass(frozen=True)
class StridedTensor(StoredTensor):
    """A tensor whose elements do not follow one another in the file, such as one that was saved
    transposed or expanded. It is read as if they did.

    Attributes:
        view_shape: The shape of the saved view, whose elements in row-major order are the tensor's.
        strides: Elements of the file between neighbors along each dimension of the view.
    """

    view_shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class WidenedTensor(StoredTensor):
    """A tensor that is read in a wider floating-point type than it is stored in.

    Attributes:
        narrow: The tensor as it is stored.
    """

    narrow: StoredTensor


# A chunk: the offset of its first element in each dimension of the whole tensor, and where the
# chunk is stored.
Chunk = tuple[tuple[int, ...], StoredTensor]


@dataclass(frozen=True)
class ChunkedTensor(StoredTensor):
    """A tensor that is stored in several chunks; `file` and `offset` are those of the first one.

    Its bytes are nowhere in one piece, so it is read by `list_chunks` alone.
    """

    chunks: tuple[Chunk, ...]


def list_chunks(tensor: StoredTensor) -> tuple[Chunk, ...]:
    """Returns the chunks of a tensor, or the tensor itself as the only chunk."""
    if isinstance(tensor, ChunkedTensor):
        return tensor.chunks
    origin = (0,) * len(tensor.shape)
    return ((origin, tensor),)


def cut_rows(tensor: StoredTensor, start: int, stop: int, name: str) -> StoredTensor:
    """Returns rows [start, stop) of a tensor as a tensor of their own.

    Args:
        tensor: The tensor, of one dimension or more.
        start, stop: The rows.
        name: The name of the result.

    Raises:
        ValueError: The elements of the tensor do not follow one another in the file.
    """
    if isinstance(tensor, (StridedTensor, WidenedTensor)):
        raise ValueError(f"{tensor} is stored as a view of another tensor; save it contiguous")
    shape = (stop - start, *tensor.shape[1:])
    found: list[Chunk] = []
    for origin, chunk in list_chunks(tensor):
        low = max(start, origin[0])
        high = min(stop, origin[0] + chunk.shape[0])
        if low >= high:
            continue
        row_bytes = prod(chunk.shape[1:]) * item_size(chunk.dtype)
        part = replace(
            chunk,
            name=name,
            shape=(high - low, *chunk.shape[1:]),
            offset=chunk.offset + (low - origin[0]) * row_bytes,
        )
        found.append(((low - start, *origin[1:]), part))
    if not found:
        raise ValueError(f"no chunk of {tensor} has its rows from {start} on")
    if not isinstance(tensor, ChunkedTensor):
        return found[0][1]
    first = found[0][1]
    return ChunkedTensor(name, first.file, first.dtype, shape, first.offset, tuple(found))


def index_by_name(tensors: list[StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors by name.

    Raises:
        ValueError: Two of them have the same name.
    """
    by_name: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if tensor.name in by_name:
            raise ValueError(f"{tensor} is also in {by_name[tensor.name].file}")
        by_name[tensor.name] = tensor
    return by_name
