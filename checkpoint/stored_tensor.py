"""Describes a tensor stored in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from .dtypes import item_size


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, without its values.

    Attributes:
        dtype: The safetensors name of the type.
        shape: The shape as stored, in row-major order.
        offset: Byte of the file at which its values start.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * item_size(self.dtype)

    def at_least_1d(self) -> StoredTensor:
        """Returns the tensor with the shape (1,) instead of ()."""
        return self if self.shape else replace(self, shape=(1,))

    def __str__(self) -> str:
        return f"tensor {self.name} in {self.file}"


@dataclass(frozen=True)
class ChunkedTensor(StoredTensor):
    """A tensor that is stored in several chunks; `file` and `offset` are those of the first one.

    Attributes:
        chunks: For each chunk the indices of its first element, and the stored chunk.
    """

    chunks: tuple[tuple[tuple[int, ...], StoredTensor], ...] = ()


def pieces(tensor: StoredTensor) -> tuple[tuple[tuple[int, ...], StoredTensor], ...]:
    """Returns the chunks of a tensor, or the tensor itself as the only one: first indices, stored tensor."""
    return (
        tensor.chunks
        if isinstance(tensor, ChunkedTensor)
        else (((0,) * len(tensor.shape), tensor),)
    )


def index_by_name(tensors: list[StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors by name. Raises ValueError if two of them have the same name."""
    by_name: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if tensor.name in by_name:
            raise ValueError(f"{tensor} is also in {by_name[tensor.name].file}")
        by_name[tensor.name] = tensor
    return by_name
