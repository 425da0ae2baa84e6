"""Reads and checks the headers of safetensors files, and makes new ones.

The format: an unsigned 64-bit little-endian length, that many bytes of JSON, then the tensors' bytes without gaps.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard, cast

from ..files.strict_json import LARGEST_JSON, is_object, maps_to_text, parse_json
from .dtypes import DTYPES, item_size
from .stored_tensor import StoredTensor

ALIGNMENT = 8


def read_header(path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """Returns a file's tensors in the order of their bytes, and its metadata.

    Raises:
        ValueError: The file is truncated, a tensor has an unknown type, a shape that does not match its bytes or
            offsets outside the file, or tensors overlap or leave a gap. The message names the file and the tensor.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length_bytes = file.read(8)
        if len(length_bytes) < 8:
            raise ValueError(f"{path} has {size} bytes, too few for a safetensors file")
        (length,) = struct.unpack("<Q", length_bytes)
        if length > size - 8:
            raise ValueError(
                f"{path} declares a header of {length:,} bytes, but has {size:,} bytes in all"
            )
        if length > LARGEST_JSON:
            raise ValueError(
                f"{path} declares a header of {length:,} bytes; at most {LARGEST_JSON:,} are read"
            )
        text = file.read(length)
    if not text.startswith(b"{"):
        raise ValueError(
            f"the header of {path} does not start with '{{': it is not a safetensors file"
        )
    header = parse_json(text, f"the header of {path}")
    metadata = header.pop("__metadata__", {})
    if not maps_to_text(metadata):
        raise ValueError(f"the __metadata__ of {path} must map names to text")
    start, data_size = 8 + length, size - 8 - length
    spans = sorted((_span(path, name, entry, data_size), name) for name, entry in header.items())
    _check_gapless(path, spans, data_size)
    tensors = [
        StoredTensor(name, path, header[name]["dtype"], tuple(header[name]["shape"]), start + begin)
        for (begin, _), name in spans
    ]
    return tensors, metadata


def _span(path: Path, name: str, entry: object, data_size: int) -> tuple[int, int]:
    """Checks the header entry of one tensor and returns the tensor's [begin, end) within the data."""
    where = f"tensor {name!r} in {path}"
    if not name or not is_object(entry) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} must have a name and exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where} has type {dtype!r}; supported types are {', '.join(DTYPES)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{where} must have a shape and two data_offsets of whole numbers >= 0")
    begin, end = offsets
    if not begin <= end <= data_size:
        raise ValueError(
            f"{where} claims bytes [{begin:,}, {end:,}) of {data_size:,}: the file is truncated or wrong"
        )
    nbytes = item_size(dtype)
    for length in shape:
        nbytes *= length
    if end - begin != nbytes:
        raise ValueError(f"{where} has {end - begin:,} bytes, but {dtype} {shape} needs {nbytes:,}")
    return begin, end


def _are_counts(values: object) -> TypeGuard[list[int]]:
    if not isinstance(values, list):
        return False
    return all(type(value) is int and 0 <= value < 1 << 63 for value in cast(list[Any], values))


def _check_gapless(path: Path, spans: list[tuple[tuple[int, int], str]], data_size: int) -> None:
    position, before = 0, "the header"
    for (begin, end), name in spans:
        if begin != position:
            problem = "overlaps" if begin < position else "leaves a gap after"
            raise ValueError(f"tensor {name!r} in {path} {problem} {before}")
        position, before = end, f"tensor {name!r}"
    if position != data_size:
        raise ValueError(f"{path} has {data_size - position:,} bytes after its last tensor")


def make_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Returns the first bytes of a new file with tensors name -> (type, shape), and name -> offset within the file.

    Tensors are stored by descending element size and otherwise in the given order, so that each one starts aligned.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item_size(item[1][0])):
        nbytes = item_size(dtype)
        for length in shape:
            nbytes *= length
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start = 8 + len(text)
    offsets = {name: start + header[name]["data_offsets"][0] for name in tensors}
    return struct.pack("<Q", len(text)) + text, offsets
