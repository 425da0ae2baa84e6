"""Plans the files of `torch.save` that a conversion writes.

A planned file has the zip format of `torch.save`. Its pickle refers only to the functions that
`torch.save` refers to, so `torch.load(weights_only=True)` and all tools that read such files can
load it.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import _utils

from ..dtypes import item_size
from ..planned_file import PlannedFile
from ..stored_tensor import StoredTensor
from .torch_file import IN_WIDE_FIELD

# The parts of zip files that are written, with all fields.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_CENTRAL_HEADER = struct.Struct("<4s6H3L5H2L")
_WIDE_SIZES = struct.Struct("<2HQQ")  # the zip64 field of a local header: id, length, two sizes
_WIDE_SIZES_AND_OFFSET = struct.Struct("<2HQQQ")  # that of a central header, with the offset
_WIDE_END = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
# January 1, 1980, the earliest date of the zip format: equal contents give equal bytes.
_FIRST_DATE = 0x21
_ZIP_VERSION = 45  # 4.5, the first with zip64
_LOCAL_CHECKSUM_AT = 14  # byte of a local header
_CENTRAL_CHECKSUM_AT = 16  # byte of a central header
_RECORD_ALIGNMENT = 64  # bytes
_PADDING_FIELD = 0x4246  # id of an extra field that readers skip, "FB"
_ROOT = "archive"  # the folder that all records of a planned file are in

# Safetensors' name of a type -> the class that a torch file names for it.
_STORAGES = {
    "F64": torch.DoubleStorage,
    "F32": torch.FloatStorage,
    "F16": torch.HalfStorage,
    "BF16": torch.BFloat16Storage,
    "I64": torch.LongStorage,
    "I32": torch.IntStorage,
    "U8": torch.ByteStorage,
    "BOOL": torch.BoolStorage,
}
_REBUILD_TENSOR = cast(Any, _utils)._rebuild_tensor_v2  # the function that torch.save names


@dataclass(frozen=True)
class PlannedRecord:
    """Where a record of a planned zip file is. Its checksum is known only when it is written.

    Attributes:
        name: The name in the zip file.
        local_header: First byte of the header before the record.
        central_header: First byte of the header in the directory.
        start: First byte of the record.
        length: Bytes of the record.
    """

    name: str
    local_header: int
    central_header: int
    start: int
    length: int

    def shift(self, count: int) -> PlannedRecord:
        """Returns the record of the same zip file `count` bytes further on."""
        return replace(
            self,
            local_header=self.local_header + count,
            central_header=self.central_header + count,
            start=self.start + count,
        )


@dataclass(frozen=True)
class PlannedTorchFile(PlannedFile):
    """A file in torch's zip format that will be written.

    Attributes:
        contents: (first byte, bytes) of everything that is not a tensor.
        records: All records of the zip format, whose headers get checksums at the end.
    """

    contents: tuple[tuple[int, bytes], ...] = ()
    records: tuple[PlannedRecord, ...] = ()

    def create(self, path: Path) -> None:
        super().create(path)
        with path.open("r+b") as file:
            for offset, content in self.contents:
                os.pwrite(file.fileno(), content, offset)

    def complete(self, path: Path) -> None:
        """Writes the checksums of all records into their headers."""
        with path.open("r+b") as file:
            descriptor = file.fileno()
            for record in self.records:
                checksum = 0
                stop = record.start + record.length
                for position in range(record.start, stop, 1 << 20):
                    block = os.pread(descriptor, min(1 << 20, stop - position), position)
                    checksum = zlib.crc32(block, checksum)
                packed = struct.pack("<L", checksum)
                os.pwrite(descriptor, packed, record.local_header + _LOCAL_CHECKSUM_AT)
                os.pwrite(descriptor, packed, record.central_header + _CENTRAL_CHECKSUM_AT)


def plan_torch_file(
    name: str,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    arrange: Callable[[OrderedDict[str, Any]], Any],
) -> PlannedTorchFile:
    """Plans a torch file.

    Args:
        name: The path within the destination.
        shapes: Name of a tensor -> (safetensors name of its type, shape).
        arrange: Makes, of the named tensors, the object that the file loads as.

    Raises:
        ValueError: Such files cannot store a type.
    """
    for tensor, (dtype, _) in shapes.items():
        if dtype not in _STORAGES:
            raise ValueError(
                f"a torch file cannot hold {dtype}, the type of {tensor}; "
                f"choose another one with --dtype"
            )

    # The records in the order of torch.save: of tensors only the bytes' number is known.
    records: list[tuple[str, bytes | int]] = [
        ("data.pkl", _pickle_tensors(shapes, arrange)),
        ("byteorder", b"little"),
    ]
    for number, (dtype, shape) in enumerate(shapes.values()):
        records.append((f"data/{number}", prod(shape) * item_size(dtype)))
    records.append(("version", b"3\n"))

    # Each record follows its local header.
    position = 0
    contents: list[tuple[int, bytes]] = []
    placed: list[PlannedRecord] = []
    for record_name, content in records:
        length = content if isinstance(content, int) else len(content)
        local = _pack_local_header(record_name, length, position)
        if isinstance(content, int):
            contents.append((position, local))
        else:
            contents.append((position, local + content))
        start = position + len(local)
        placed.append(PlannedRecord(record_name, position, 0, start, length))
        position = start + length

    # The directory at the end has a central header for each record.
    directory = b""
    for index, record in enumerate(placed):
        placed[index] = replace(record, central_header=position + len(directory))
        directory += _pack_central_header(record)
    end = _pack_end(len(placed), len(directory), position)
    contents.append((position, directory + end))
    size = position + len(directory) + len(end)

    path = Path(name)
    starts = {record.name: record.start for record in placed}
    tensors = {
        tensor: StoredTensor(tensor, path, dtype, shape, starts[f"data/{number}"])
        for number, (tensor, (dtype, shape)) in enumerate(shapes.items())
    }
    header = contents[0][1]
    return PlannedTorchFile(name, header, size, tensors, tuple(contents), tuple(placed))


def plan_concatenated_file(
    name: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[PlannedTorchFile, dict[str, tuple[int, int]]]:
    """Plans a file with one output of `torch.save` after another, one for each tensor.

    Args:
        name: The path within the destination.
        shapes: Name of a tensor -> (safetensors name of its type, shape).

    Returns:
        The file, and for each tensor the first byte and the length of its output.
    """
    position = 0
    contents: list[tuple[int, bytes]] = []
    records: list[PlannedRecord] = []
    tensors: dict[str, StoredTensor] = {}
    windows: dict[str, tuple[int, int]] = {}
    for tensor, shape in shapes.items():
        own = plan_torch_file(name, {tensor: shape}, _take_only_value)
        contents += [(position + offset, content) for offset, content in own.contents]
        records += [record.shift(position) for record in own.records]
        stored = own.tensors[tensor]
        tensors[tensor] = replace(stored, offset=stored.offset + position)
        windows[tensor] = (position, own.size)
        position += own.size
    header = contents[0][1]
    file = PlannedTorchFile(name, header, position, tensors, tuple(contents), tuple(records))
    return file, windows


def _take_only_value(tensors: OrderedDict[str, Any]) -> Any:
    (value,) = tensors.values()
    return value


@dataclass(frozen=True)
class _PickledStorage:
    """A storage that is pickled by its place in the zip file; `key` is the number of its record."""

    key: str
    dtype: str
    count: int


class _PickledTensor:
    """Is pickled as `torch.save` pickles a contiguous tensor."""

    def __init__(self, storage: _PickledStorage, shape: tuple[int, ...]) -> None:
        self._storage = storage
        self._shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(prod(self._shape[dim + 1 :]) for dim in range(len(self._shape)))
        return _REBUILD_TENSOR, (self._storage, 0, self._shape, strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if isinstance(obj, _PickledStorage):
            return "storage", _STORAGES[obj.dtype], obj.key, "cpu", obj.count
        return None


def _pickle_tensors(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    arrange: Callable[[OrderedDict[str, Any]], Any],
) -> bytes:
    tensors: OrderedDict[str, Any] = OrderedDict()
    for number, (name, (dtype, shape)) in enumerate(shapes.items()):
        storage = _PickledStorage(str(number), dtype, prod(shape))
        tensors[name] = _PickledTensor(storage, shape)
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(arrange(tensors))
    return stream.getvalue()


def _encode_record_name(name: str) -> bytes:
    return f"{_ROOT}/{name}".encode()


def _pack_local_header(name: str, length: int, position: int) -> bytes:
    """Returns a record's local header.

    An extra field that readers skip fills it up, so that the record behind it starts aligned.
    """
    path = _encode_record_name(name)
    wide = _WIDE_SIZES.pack(1, 16, length, length)
    unpadded = position + _LOCAL_HEADER.size + len(path) + len(wide) + 4
    padding = -unpadded % _RECORD_ALIGNMENT
    extra = wide + struct.pack("<2H", _PADDING_FIELD, padding) + b"\0" * padding
    header = _LOCAL_HEADER.pack(
        b"PK\3\4",
        _ZIP_VERSION,
        0,
        0,
        0,
        _FIRST_DATE,
        0,
        IN_WIDE_FIELD,
        IN_WIDE_FIELD,
        len(path),
        len(extra),
    )
    return header + path + extra


def _pack_central_header(record: PlannedRecord) -> bytes:
    path = _encode_record_name(record.name)
    wide = _WIDE_SIZES_AND_OFFSET.pack(1, 24, record.length, record.length, record.local_header)
    header = _CENTRAL_HEADER.pack(
        b"PK\1\2",
        _ZIP_VERSION,
        _ZIP_VERSION,
        0,
        0,
        0,
        _FIRST_DATE,
        0,
        IN_WIDE_FIELD,
        IN_WIDE_FIELD,
        len(path),
        len(wide),
        0,
        0,
        0,
        0,
        IN_WIDE_FIELD,
    )
    return header + path + wide


def _pack_end(count: int, length: int, start: int) -> bytes:
    """Returns the zip64 end of the directory, its locator, and the end in the older zip format."""
    wide = _WIDE_END.pack(
        b"PK\6\6",
        _WIDE_END.size - 12,
        _ZIP_VERSION,
        _ZIP_VERSION,
        0,
        0,
        count,
        count,
        length,
        start,
    )
    locator = _LOCATOR.pack(b"PK\6\7", 0, start + length, 1)
    short_count = min(count, 0xFFFF)
    end = _END.pack(b"PK\5\6", 0, 0, short_count, short_count, IN_WIDE_FIELD, IN_WIDE_FIELD, 0)
    return wide + locator + end
