"""Lays out new weight files and creates them at full size; the bytes of their tensors are written later.

A torch file has the zip format of `torch.save`. Its pickle refers only to the functions that `torch.save` refers to, so
`torch.load(weights_only=True)` and all tools that read such files can load it.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import _utils

from .dtypes import item_size, torch_name
from .safetensors_header import make_header
from .stored_tensor import StoredTensor

METADATA = {"format": "pt"}
ROOT = "archive"
ALIGNMENT = 64  # bytes
STORAGES = {  # safetensors name of a type -> class that a torch file names for it
    "F64": torch.DoubleStorage,
    "F32": torch.FloatStorage,
    "F16": torch.HalfStorage,
    "BF16": torch.BFloat16Storage,
    "I64": torch.LongStorage,
    "I32": torch.IntStorage,
    "U8": torch.ByteStorage,
    "BOOL": torch.BoolStorage,
}
REBUILD_TENSOR = cast(Any, _utils)._rebuild_tensor_v2  # the function that torch.save names
LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
WIDE = struct.Struct("<2HQQ")  # zip64 field of a local header: its id, its length and two sizes
WIDE_CENTRAL = struct.Struct("<2HQQQ")
END_WIDE = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
END = struct.Struct("<4s4H2LH")
FAR = 0xFFFFFFFF  # means that the zip64 field has the number


@dataclass(frozen=True)
class NewFile:
    """A safetensors file that will be written.

    Attributes:
        name: Path within the destination.
        size: Bytes of the whole file.
        tensors: Where the bytes of each tensor belong.
    """

    name: str
    header: bytes
    size: int
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])

    def create(self, path: Path) -> None:
        """Creates the file at its full size, so that a full disk is noticed before any tensor is copied."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, self.size)
            os.pwrite(descriptor, self.header, 0)
        finally:
            os.close(descriptor)

    def complete(self, path: Path) -> None:
        """Finishes the file after all its tensors are written."""


def new_safetensors_file(name: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> NewFile:
    """Lays out a safetensors file with these tensors: name -> (type, shape)."""
    header, offsets = make_header(shapes, METADATA)
    path = Path(name)
    tensors = {
        key: StoredTensor(key, path, dtype, shape, offsets[key])
        for key, (dtype, shape) in shapes.items()
    }
    size = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=len(header))
    return NewFile(name, header, size, tensors)


@dataclass(frozen=True)
class NewTorchFile(NewFile):
    """A file in torch's zip format that will be written.

    Attributes:
        pieces: (offset, bytes) of everything that is not a tensor.
        records: (offset of the local header, offset of the central header, first byte, length) of each record; its
            checksum is known only when its bytes are written.
    """

    pieces: tuple[tuple[int, bytes], ...] = ()
    records: tuple[tuple[int, int, int, int], ...] = ()

    def create(self, path: Path) -> None:
        super().create(path)
        with path.open("r+b") as file:
            for offset, content in self.pieces:
                os.pwrite(file.fileno(), content, offset)

    def complete(self, path: Path) -> None:
        """Writes the checksums of all records into their headers."""
        with path.open("r+b") as file:
            for local, central, start, length in self.records:
                checksum = 0
                for position in range(start, start + length, 1 << 20):
                    checksum = zlib.crc32(
                        os.pread(file.fileno(), min(1 << 20, start + length - position), position),
                        checksum,
                    )
                os.pwrite(file.fileno(), struct.pack("<L", checksum), local + 14)
                os.pwrite(file.fileno(), struct.pack("<L", checksum), central + 16)


def new_torch_file(
    name: str,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    arrange: Callable[[OrderedDict[str, Any]], Any],
) -> NewTorchFile:
    """Lays out a torch file that loads as what `arrange` makes of the named tensors; `shapes` is name -> (type, shape).

    Raises ValueError if such files cannot store a type.
    """
    for tensor, (dtype, _) in shapes.items():
        if dtype not in STORAGES:
            raise ValueError(
                f"a torch file cannot hold {dtype}, the type of {tensor}; choose another one with --dtype"
            )
    contents: list[tuple[str, bytes | int]] = [
        ("data.pkl", _pickle(shapes, arrange)),
        ("byteorder", b"little"),
    ]
    contents += [
        (f"data/{key}", prod(s) * item_size(d)) for key, (d, s) in enumerate(shapes.values())
    ]
    contents.append(("version", b"3\n"))
    position = 0
    placed: list[tuple[bytes, int, int, int]] = []
    pieces: list[tuple[int, bytes]] = []
    for record, content in contents:
        length = content if isinstance(content, int) else len(content)
        local = _local_header(f"{ROOT}/{record}".encode(), length, position)
        pieces.append((position, local if isinstance(content, int) else local + content))
        placed.append((f"{ROOT}/{record}".encode(), position, position + len(local), length))
        position += len(local) + length
    directory = b""
    central: list[int] = []
    for path, start, _, length in placed:
        central.append(position + len(directory))
        directory += _central_header(path, length, start)
    pieces.append((position, directory + _end(len(placed), len(directory), position)))
    file, starts = Path(name), {record: start for record, _, start, _ in placed}
    tensors = {
        key: StoredTensor(key, file, dtype, shape, starts[f"{ROOT}/data/{index}".encode()])
        for index, (key, (dtype, shape)) in enumerate(shapes.items())
    }
    records = tuple(
        (place[1], at, place[2], place[3]) for place, at in zip(placed, central, strict=True)
    )
    size = pieces[-1][0] + len(pieces[-1][1])
    return NewTorchFile(name, pieces[0][1], size, tensors, tuple(pieces), records)


def new_chunk_file(
    name: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[NewTorchFile, dict[str, tuple[int, int]]]:
    """Lays out a file with one output of `torch.save` after another, one for each tensor: name -> (type, shape).

    Also returns the first byte and the length of each output.
    """
    position = 0
    parts: list[tuple[int, bytes]] = []
    records: list[tuple[int, int, int, int]] = []
    tensors: dict[str, StoredTensor] = {}
    windows: dict[str, tuple[int, int]] = {}
    for key, kind in shapes.items():
        own = new_torch_file(name, {key: kind}, lambda found: next(iter(found.values())))
        parts += [(position + at, content) for at, content in own.pieces]
        records += [
            (local + position, at + position, start + position, size)
            for local, at, start, size in own.records
        ]
        tensors[key] = replace(own.tensors[key], offset=own.tensors[key].offset + position)
        windows[key] = (position, own.size)
        position += own.size
    return NewTorchFile(name, parts[0][1], position, tensors, tuple(parts), tuple(records)), windows


def dcp_metadata(
    files: Sequence[tuple[NewTorchFile, Mapping[str, tuple[int, int]]]], aliases: Mapping[str, str]
) -> bytes:
    """Returns the `.metadata` of such files, which `torch.distributed.checkpoint` reads.

    An alias is another name for a stored tensor, and needs no bytes.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    listed: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for file, windows in files:
        for name, (start, length) in windows.items():
            tensor = file.tensors[name]
            origin, size = torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape)
            properties = metadata.TensorProperties(dtype=getattr(torch, torch_name(tensor.dtype)))
            for own in (name, *(alias for alias, kept in aliases.items() if kept == name)):
                chunk = metadata.ChunkStorageMetadata(origin, size)
                listed[own] = metadata.TensorStorageMetadata(properties, size, [chunk])
                place = cast(Any, filesystem)._StorageInfo(file.name, start, length)
                places[metadata.MetadataIndex(own, origin, 0)] = place
    names = {name: (name,) for name in listed}
    return pickle.dumps(metadata.Metadata(listed, names, places, metadata.StorageMeta(), "1.0.0"))


@dataclass(frozen=True)
class _Storage:
    """A storage that is pickled by its place in the zip file; `key` is the number of its record."""

    key: str
    dtype: str
    count: int


class _Tensor:
    """Is pickled as `torch.save` pickles a contiguous tensor."""

    def __init__(self, storage: _Storage, shape: tuple[int, ...]) -> None:
        self._storage, self._shape = storage, shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(prod(self._shape[i + 1 :]) for i in range(len(self._shape)))
        return REBUILD_TENSOR, (self._storage, 0, self._shape, strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if isinstance(obj, _Storage):
            return "storage", STORAGES[obj.dtype], obj.key, "cpu", obj.count
        return None


def _pickle(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    arrange: Callable[[OrderedDict[str, Any]], Any],
) -> bytes:
    tensors = OrderedDict(
        (name, _Tensor(_Storage(str(key), dtype, prod(shape)), shape))
        for key, (name, (dtype, shape)) in enumerate(shapes.items())
    )
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(arrange(tensors))
    return stream.getvalue()


def _local_header(name: bytes, length: int, position: int) -> bytes:
    """Returns a record's local header, with an extra field that readers skip, so that the record starts aligned."""
    wide = WIDE.pack(1, 16, length, length)
    unpadded = position + LOCAL.size + len(name) + len(wide) + 4
    padding = struct.pack("<2H", 0x4246, -unpadded % ALIGNMENT) + b"\0" * (-unpadded % ALIGNMENT)
    extra = wide + padding
    return (
        LOCAL.pack(b"PK\3\4", 45, 0, 0, 0, 0x21, 0, FAR, FAR, len(name), len(extra)) + name + extra
    )


def _central_header(name: bytes, length: int, local: int) -> bytes:
    wide = WIDE_CENTRAL.pack(1, 24, length, length, local)
    return (
        CENTRAL.pack(
            b"PK\1\2", 45, 45, 0, 0, 0, 0x21, 0, FAR, FAR, len(name), len(wide), 0, 0, 0, 0, FAR
        )
        + name
        + wide
    )


def _end(count: int, length: int, start: int) -> bytes:
    """Returns the zip64 end of the directory, its locator, and the end in the original zip format."""
    wide = END_WIDE.pack(b"PK\6\6", END_WIDE.size - 12, 45, 45, 0, 0, count, count, length, start)
    locator = LOCATOR.pack(b"PK\6\7", 0, start + length, 1)
    return (
        wide
        + locator
        + END.pack(b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), FAR, FAR, 0)
    )
