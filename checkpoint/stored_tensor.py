"""A tensor as it lies in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from .dtypes import item_size


@dataclass(frozen=True)
class StoredTensor:
    """file, offset: where its bytes start. shape: as stored, row-major. dtype: safetensors' name of it."""

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
        """A single number as a vector of one."""
        return self if self.shape else replace(self, shape=(1,))

    def __str__(self) -> str:
        return f"tensor {self.name} in {self.file}"


def only_names_once(tensors: list[StoredTensor]) -> dict[str, StoredTensor]:
    """By name. ValueError if two files hold a tensor of one name."""
    by_name: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if tensor.name in by_name:
            raise ValueError(f"{tensor} is also in {by_name[tensor.name].file}")
        by_name[tensor.name] = tensor
    return by_name
