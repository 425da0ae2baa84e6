"""Plans new weight files and creates them at full size; the bytes of their tensors follow later.

A `PlannedFile` knows its header and where each tensor will be, before any byte is written. So a
conversion is checked as a whole first, and a full disk is noticed before a tensor is copied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .safetensors_header import make_header
from .stored_tensor import StoredTensor

# What safetensors calls the framework that wrote a file; transformers refuses files without it.
METADATA = {"format": "pt"}


@dataclass(frozen=True)
class PlannedFile:
    """A safetensors file that will be written.

    Attributes:
        name: The path within the destination.
        header: The first bytes of the file.
        size: Bytes of the whole file.
        tensors: Where the bytes of each tensor belong.
    """

    name: str
    header: bytes
    size: int
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])

    def create(self, path: Path) -> None:
        """Creates the file at its full size, with all bytes that are not a tensor's."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, self.size)
            os.pwrite(descriptor, self.header, 0)
        finally:
            os.close(descriptor)

    def complete(self, path: Path) -> None:
        """Finishes the file after all its tensors are written."""


def plan_safetensors_file(
    name: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> PlannedFile:
    """Plans a safetensors file.

    Args:
        name: The path within the destination.
        shapes: Name of a tensor -> (safetensors name of its type, shape).
    """
    header, offsets = make_header(shapes, METADATA)
    path = Path(name)
    tensors = {
        tensor: StoredTensor(tensor, path, dtype, shape, offsets[tensor])
        for tensor, (dtype, shape) in shapes.items()
    }
    ends = [tensor.offset + tensor.nbytes for tensor in tensors.values()]
    size = max(ends, default=len(header))
    return PlannedFile(name, header, size, tensors)
