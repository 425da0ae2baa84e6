"""Reads the header of a GGUF file: its keys, and where its tensors lie.

The `gguf` package maps the whole file and keeps an object for each token of the vocabulary, which
takes hundreds of megabytes. Here the file is read once from its beginning to its first tensor, and of
long arrays and of texts, such as the tokens, only the length is kept. After the description of the format,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (the package is an extra, and has no types)

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # bytes, unless general.alignment says otherwise
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_DIMENSIONS = 4
_MOST_KEPT = 1024  # numbers of an array, such as one for each layer
_STRING = 8
_ARRAY = 9
# Number of a type of value -> its format for `struct`.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
# Type of tensors whose numbers are not in blocks -> numpy's name of it.
_PLAIN = {
    "F16": "float16", "F32": "float32", "F64": "float64", "I8": "int8", "I16": "int16", "I32": "int32",
    "I64": "int64",
}  # fmt: skip


@dataclass(frozen=True)
class StoredRows:
    """The rows of a tensor as they lie in a file.

    They are read, not mapped: mapped pages count as memory of the process, and there are as many as
    the file has.

    Attributes:
        path: The file.
        offset: Its byte at which the rows begin.
        dtype: The type of the numbers; bytes of tensors in blocks.
        shape: The shape; of tensors in blocks, [rows, bytes].
    """

    path: Path
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def part(self, number: int) -> StoredRows:
        """Returns the rows of one of the matrices of a tensor of three dimensions."""
        shape = self.shape[1:]
        offset = self.offset + number * prod(shape) * self.dtype.itemsize
        return StoredRows(self.path, offset, self.dtype, shape)

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Returns rows [start, stop). Raises ValueError if the file ends before."""
        width = prod(self.shape[1:])
        count = (stop - start) * width
        with self.path.open("rb") as file:
            file.seek(self.offset + start * width * self.dtype.itemsize)
            found = np.fromfile(file, self.dtype, count)
        if found.size != count:
            raise ValueError(f"{self.path} ends before its row {stop}: it is incomplete")
        return found.reshape(stop - start, *self.shape[1:])


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: Its name.
        kind: Its type, a `gguf.GGMLQuantizationType`.
        shape: Its shape, rows first.
        rows: Where its numbers or blocks are.
    """

    name: str
    kind: Any
    shape: tuple[int, ...]
    rows: StoredRows


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        values: Key -> its value; of an array a tuple, or a text with its length.
        tensors: The tensors in the order of the file.
    """

    values: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads a header.

    Raises:
        ValueError: The file is damaged, or of another format or version.
        ImportError: The `gguf` package, which knows the types of tensors, is not installed.
    """
    with path.open("rb") as file:
        return _HeaderReader(path, file, path.stat().st_size).read()


class _HeaderReader:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.order: Literal["<", ">"] = "<"

    def read(self) -> GgufHeader:
        if self.take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self.read_number("I")
        if version not in _VERSIONS and version & 0xFFFF == 0:
            self.order = ">"  # of a machine that stores the highest byte first
            version = struct.unpack(">I", struct.pack("<I", version))[0]
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version}; those that are read are 2 and 3")
        tensors = self.read_count(_MOST_TENSORS, "tensors")
        keys = self.read_count(_MOST_KEYS, "keys")

        values: dict[str, Any] = {}
        for _ in range(keys):
            name = self.read_text()
            if name in values:
                raise ValueError(f"it has the key {name!r} twice")
            values[name] = self.read_value(self.read_number("I"))
        described: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(tensors):
            name = self.read_text()
            dimensions = self.read_number("I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise ValueError(f"the tensor {name!r} has {dimensions} dimensions")
            shape = tuple(self.read_number("Q") for _ in range(dimensions))
            described.append((name, shape[::-1], self.read_number("I"), self.read_number("Q")))

        alignment = values.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment={alignment!r} must be a positive number")
        first = -(-self.file.tell() // alignment) * alignment
        located = [self.locate(first, *tensor) for tensor in described]
        return GgufHeader(values, tuple(located))

    def locate(
        self, first: int, name: str, shape: tuple[int, ...], number: int, offset: int
    ) -> GgufTensor:
        """Returns a tensor.

        Args:
            first: The byte of the file from which offsets count.
            name: Its name.
            shape: Its shape, rows first.
            number: The number of its type.
            offset: Its first byte.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType(number)
        plain = _PLAIN.get(kind.name)
        if plain is not None:
            dtype = np.dtype(plain).newbyteorder(self.order)
            stored = shape
        else:
            dtype = np.dtype("uint8")
            block, size = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ValueError(
                    f"rows of the tensor {name!r} have {shape[-1]} numbers, which are no blocks of "
                    f"{block}"
                )
            stored = (*shape[:-1], shape[-1] // block * size)
        rows = StoredRows(self.path, first + offset, dtype, stored)
        if rows.offset + rows.nbytes > self.size:
            raise ValueError(f"the tensor {name!r} lies behind its end")
        return GgufTensor(name, kind, shape, rows)

    def take(self, count: int) -> bytes:
        """Returns the next bytes. Raises ValueError if the file ends before."""
        if count > self.size:
            raise ValueError("it ends within its header")
        found = self.file.read(count)
        if len(found) != count:
            raise ValueError("it ends within its header")
        return found

    def skip(self, count: int) -> None:
        if self.file.tell() + count > self.size:
            raise ValueError("it ends within its header")
        self.file.seek(count, 1)

    def read_number(self, kind: str) -> Any:
        form = self.order + kind
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def read_count(self, most: int, what: str) -> int:
        found = self.read_number("Q")
        if found > most:
            raise ValueError(f"it has {found:,} {what}; there can be {most:,}")
        return found

    def read_text(self) -> str:
        return self.take(self.read_number("Q")).decode("utf-8")

    def read_value(self, kind: int) -> Any:
        """Returns a value; of an array of a few numbers a tuple, of others a text with the length."""
        if kind in _SCALARS:
            return self.read_number(_SCALARS[kind])
        if kind == _STRING:
            return self.read_text()
        if kind != _ARRAY:
            raise ValueError(f"it has a value of the type {kind}, which the format does not have")
        inner = self.read_number("I")
        count = self.read_number("Q")
        if inner in _SCALARS and count <= _MOST_KEPT:
            return tuple(self.read_number(_SCALARS[inner]) for _ in range(count))
        if inner in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[inner]}"))
        elif inner == _STRING:
            for _ in range(count):
                self.skip(self.read_number("Q"))
        else:
            raise ValueError(f"it has an array of the type {inner}, which is not read")
        return f"an array of {count}"
