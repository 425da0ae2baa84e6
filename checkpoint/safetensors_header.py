"""Reads and checks the headers of safetensors files, and makes new ones.

The format: an unsigned 64-bit little-endian length, that many bytes of JSON, then the tensors'
bytes without gaps. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeGuard, cast

from ..files.strict_json import LARGEST_JSON, is_object, maps_to_text, parse_json
from ..files.working_copies import close_file, open_for_reading, read_at
from .dtypes import DTYPES, item_size
from .stored_tensor import StoredTensor, read_file_state

LENGTH = struct.Struct("<Q")
ALIGNMENT = 8  # bytes


def read_header(path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """Returns a file's tensors in the order of their bytes, and its metadata.

    Raises:
        ValueError: The file is truncated, a tensor has an unknown type, a shape that does not match
            its bytes or offsets outside the file, or tensors overlap or leave a gap. The message
            names the file and the tensor.
    """
    file = open_for_reading(path)
    try:
        file_state = read_file_state(file)
        size = file_state[0]
        length_bytes = read_at(file, 0, LENGTH.size)
        if len(length_bytes) < LENGTH.size:
            raise ValueError(f"{path} has {size} bytes, too few for a safetensors file")
        (length,) = LENGTH.unpack(length_bytes)
        if length > size - LENGTH.size:
            raise ValueError(
                f"{path} declares a header of {length:,} bytes, but has {size:,} bytes in all"
            )
        if length > LARGEST_JSON:
            raise ValueError(
                f"{path} declares a header of {length:,} bytes; at most {LARGEST_JSON:,} are read"
            )
        text = read_at(file, LENGTH.size, length)
    finally:
        close_file(file)
    if not text.startswith(b"{"):
        raise ValueError(
            f"the header of {path} does not start with '{{': it is not a safetensors file"
        )
    header = parse_json(text, f"the header of {path}")
    metadata = header.pop("__metadata__", {})
    if not maps_to_text(metadata):
        raise ValueError(f"the __metadata__ of {path} must map names to text")

    data_start = LENGTH.size + length
    data_size = size - data_start
    spans: list[tuple[int, int, str]] = []  # first byte and end within the data, name
    for name, entry in header.items():
        begin, end = _read_span(path, name, entry, data_size)
        spans.append((begin, end, name))
    spans.sort()
    _check_gapless(path, spans, data_size)

    tensors: list[StoredTensor] = []
    for begin, _, name in spans:
        entry = header[name]
        shape = tuple(entry["shape"])
        offset = data_start + begin
        tensors.append(
            StoredTensor(name, path, entry["dtype"], shape, offset, file_state=file_state)
        )
    return tensors, metadata


def _read_span(path: Path, name: str, entry: object, data_size: int) -> tuple[int, int]:
    """Checks a tensor's entry of the header and returns its first byte and end within the data."""
    where = f"tensor {name!r} in {path}"
    if not name or not is_object(entry) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} must have a name and exactly dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where} has type {dtype!r}; supported types are {', '.join(DTYPES)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{where} must have a shape and two data_offsets of whole numbers >= 0")
    begin, end = offsets
    if not begin <= end <= data_size:
        raise ValueError(
            f"{where} claims bytes [{begin:,}, {end:,}) of {data_size:,}: "
            f"the file is truncated or wrong"
        )
    nbytes = item_size(dtype) * prod(shape)
    if end - begin != nbytes:
        raise ValueError(f"{where} has {end - begin:,} bytes, but {dtype} {shape} needs {nbytes:,}")
    return begin, end


def _are_counts(values: object) -> TypeGuard[list[int]]:
    if not isinstance(values, list):
        return False
    return all(type(value) is int and 0 <= value < 1 << 63 for value in cast(list[Any], values))


def _check_gapless(path: Path, spans: list[tuple[int, int, str]], data_size: int) -> None:
    """Raises ValueError unless the sorted spans cover the data without gaps or overlaps."""
    position = 0
    before = "the header"
    for begin, end, name in spans:
        if begin != position:
            problem = "overlaps" if begin < position else "leaves a gap after"
            raise ValueError(f"tensor {name!r} in {path} {problem} {before}")
        position = end
        before = f"tensor {name!r}"
    if position != data_size:
        raise ValueError(f"{path} has {data_size - position:,} bytes after its last tensor")


def make_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Makes the header of a new file.

    Tensors are stored by descending element size and otherwise in the given order, so that each one
    starts aligned.

    Args:
        tensors: Name -> (safetensors name of the type, shape).
        metadata: Text that the header carries.

    Returns:
        The first bytes of the file; and name -> offset of the tensor within the file.
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    position = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item_size(item[1][0])):
        end = position + item_size(dtype) * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    data_start = LENGTH.size + len(text)
    offsets = {name: data_start + header[name]["data_offsets"][0] for name in tensors}
    return LENGTH.pack(len(text)) + text, offsets
