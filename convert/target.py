"""What a destination will look like: its weight files, and where in them each parameter goes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ..checkpoint.checkpoint import EXTRAS
from ..checkpoint.dtypes import FLOATS, item_size
from ..checkpoint.layout import CheckpointLayout, ParameterPlacement, TensorSlice, place_by_rank
from ..checkpoint.safetensors_header import make_header
from ..checkpoint.stored_tensor import StoredTensor
from ..models.mapping import MappedCheckpoint, stacked_ranges, stored_shape

METADATA = {"format": "pt"}
LARGEST_FILE = 5 * 10**9  # of a Hugging Face folder, before it is divided into several


@dataclass(frozen=True)
class NewFile:
    """A safetensors file to be written. name: within the destination. header: its first bytes. size: in all."""

    name: str
    header: bytes
    size: int

    def create(self, path: Path) -> None:
        """Makes the file at its full size, so that a full disk shows before any tensor is copied."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, self.size)
            os.pwrite(descriptor, self.header, 0)
        finally:
            os.close(descriptor)

    def complete(self, path: Path) -> None:
        """Called when every tensor is written."""


@dataclass(frozen=True)
class Target:
    """layout: files by name within the destination. texts: small files written with it, by name."""

    kind: str
    size: int
    layout: CheckpointLayout
    files: tuple[NewFile, ...]
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def shards_target(mapped: MappedCheckpoint, size: int, dtype: str | None = None) -> Target:
    """A shardzoo folder of `size` ranks. ValueError, naming the sizes that work, if the model cannot be split so."""
    mapped.model.check_size(size)
    dtypes = new_dtypes(mapped, dtype)
    shapes = {name: (dtypes[name], p.local_shape(size)) for name, p in mapped.model.parameters.items()}
    files, ranks = [], []
    for rank in range(size):
        file, tensors = _new_file(f"rank_{rank:02d}.safetensors", shapes)
        files.append(file)
        ranks.append(tensors)
    placements = place_by_rank(mapped.model.parameters, ranks)
    extras: dict[str, StoredTensor] = {}
    if mapped.layout.extras:
        extra_shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in mapped.layout.extras.items()}
        file, extras = _new_file(EXTRAS, extra_shapes)
        files.append(file)
    return Target("shards", size, CheckpointLayout(placements, extras), tuple(files))


def huggingface_target(mapped: MappedCheckpoint, dtype: str | None = None, largest_file: int = LARGEST_FILE) -> Target:
    """A Hugging Face folder with the names that the weights had in the one they came from, else today's."""
    dtypes = new_dtypes(mapped, dtype)
    known = mapped.model.entries()
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, parameter in mapped.model.parameters.items():
        spans = stacked_ranges(parameter, known[name])
        copies = mapped.names.copies(name)
        for stored in {stored for copy in copies for stored in copy}:
            if stored in shapes:
                raise ValueError(f"two tensors would be called {stored}")
        for copy in copies:
            for stored, span in zip(copy, spans, strict=True):
                shapes[stored] = (dtypes[name], stored_shape(parameter, span, known[name]))
    for name, tensor in mapped.layout.extras.items():
        if name in shapes:
            raise ValueError(f"{tensor} has the name of a parameter's tensor")
        shapes[name] = (tensor.dtype, tensor.shape)
    files, tensors, texts = _divide(shapes, largest_file)
    placements = {}
    for name, parameter in mapped.model.parameters.items():
        spans, transpose = stacked_ranges(parameter, known[name]), known[name].transpose
        parts = (
            tuple(
                TensorSlice(tensors[stored].at_least_1d(), (span,), transpose)
                for stored, span in zip(copy, spans, strict=True)
            )
            for copy in mapped.names.copies(name)
        )
        placements[name] = ParameterPlacement(name, parameter.shape or (1,), parameter.dim, tuple(parts))
    extras = {name: tensors[name] for name in mapped.layout.extras}
    return Target("huggingface", 1, CheckpointLayout(placements, extras), files, texts)


def _divide(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]], largest_file: int
) -> tuple[tuple[NewFile, ...], dict[str, StoredTensor], dict[str, str]]:
    """Tensors over files of at most `largest_file` bytes, in order; an index where that takes more than one."""
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, (dtype, shape) in shapes.items():
        nbytes = prod(shape) * item_size(dtype)
        if groups[-1] and filled + nbytes > largest_file:
            groups.append({})
            filled = 0
        groups[-1][name] = (dtype, shape)
        filled += nbytes
    if len(groups) == 1:
        file, tensors = _new_file("model.safetensors", groups[0])
        return (file,), tensors, {}
    files, tensors = [], {}
    for number, group in enumerate(groups, 1):
        file, new = _new_file(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        files.append(file)
        tensors |= new
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: str(tensors[name].file) for name in sorted(tensors)},
    }
    return tuple(files), tensors, {"model.safetensors.index.json": json.dumps(index, indent=2) + "\n"}


def _new_file(name: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[NewFile, dict[str, StoredTensor]]:
    header, offsets = make_header(shapes, METADATA)
    path = Path(name)
    tensors = {key: StoredTensor(key, path, dtype, shape, offsets[key]) for key, (dtype, shape) in shapes.items()}
    size = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=len(header))
    return NewFile(name, header, size), tensors


def new_dtypes(mapped: MappedCheckpoint, dtype: str | None) -> dict[str, str]:
    """Each parameter's type in the destination: its own, or for floats the one that was asked for."""
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"cannot convert to {dtype}; use one of {', '.join(FLOATS)}")
    own = {name: placement.dtype for name, placement in mapped.layout.placements.items()}
    return {name: dtype if dtype and kind in FLOATS else kind for name, kind in own.items()}
