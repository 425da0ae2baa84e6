"""Reads what OneFlow's `flow.save` writes, without OneFlow.

There are three forms: one pickled file with the values; a folder with the pickle `pickled_data` and
a folder for each tensor; and an older folder with `snapshot_done` and a folder for each name. A
tensor's folder has the text `meta`, its type and shape, and `out`, its values in row-major order.
Tensors are whole, however they were split in training. No code of a pickle is run: OneFlow's
objects become plain data, and other classes are refused.
"""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ...files.safe_paths import checked_file

MAGIC_KEY = "__oneflow__"
PICKLE = "pickled_data"
SNAPSHOT_DONE = "snapshot_done"
_NUMPY_TYPES = {"f2": torch.float16, "f4": torch.float32, "f8": torch.float64}
_META_TYPES = {"kFloat": torch.float32, "kDouble": torch.float64, "kFloat16": torch.float16}
_META = re.compile(r"shape\s*\{((?:\s*dim:\s*\d{1,12})*)\s*\}\s*data_type:\s*(\w+)\s*")


class _Inert:
    """An object of OneFlow, as plain data."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Inert):
    """A numpy array: its state is (version, shape, type, column-major, bytes)."""


def _from_buffer(raw: Any, kind: Any, shape: Any, order: Any, *_: Any) -> _Array:
    """Returns a numpy array that was pickled by protocol 5, Python's own since 3.14, whose bytes
    come first.
    """
    array = _Array()
    array.state = (1, shape, kind, order != "C", bytes(raw) if isinstance(raw, bytearray) else raw)
    return array


class _ElementType(_Inert):
    """A numpy dtype: its first argument is the name, and its state's second value the byte order."""


class _Unpickler(pickle.Unpickler):
    """Makes plain values, and inert objects of OneFlow's and numpy's classes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "oneflow" or module.startswith("oneflow."):
            return _Inert
        full = f"{module}.{name}"
        if full == "collections.OrderedDict":
            return OrderedDict
        if full in ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"):
            return _Array
        if full in ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"):
            return _from_buffer
        if full == "numpy.ndarray":
            return _Inert
        if full == "numpy.dtype":
            return _ElementType
        raise pickle.UnpicklingError(f"it holds a {full}")


def is_oneflow(path: Path) -> bool:
    """Returns whether a file or folder is one that `flow.save` wrote."""
    if path.is_dir():
        return (path / PICKLE).is_file() or (path / SNAPSHOT_DONE).exists()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MAGIC_KEY.encode() in file.read(256)


def read_oneflow(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a state that `flow.save` wrote, by name.

    Raises:
        ValueError: It is damaged, holds other objects, or a type that is not floating-point.
    """
    if path.is_dir() and not (path / PICKLE).exists():
        names = sorted(entry.name for entry in path.iterdir() if entry.name != SNAPSHOT_DONE)
        return {name: _read_folder(path / name) for name in names}
    pickled = checked_file(path, PICKLE) if path.is_dir() else checked_file(path.parent, path.name)
    try:
        with pickled.open("rb") as file:
            content = _Unpickler(file).load()
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        ImportError,
        IndexError,
        KeyError,
        MemoryError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"{pickled} is refused: {str(error)[:200]}") from None
    if not isinstance(content, dict) or MAGIC_KEY not in content:
        raise ValueError(f"{pickled} was not written by flow.save")
    values = cast(dict[Any, Any], content)
    if values.get("protocol_version") != 1 or not isinstance(values.get("data"), dict):
        raise ValueError(f"{pickled} holds no named tensors in version 1 of OneFlow's format")
    tensors: dict[str, Tensor] = {}
    for name, value in cast(dict[Any, Any], values["data"]).items():
        state = value.state if isinstance(value, _Inert) else None
        if not isinstance(name, str) or not isinstance(state, dict):
            raise ValueError(f"{pickled} has something that is no tensor as {str(name)[:80]!r}")
        folder = cast(dict[str, Any], state).get("path")
        if isinstance(folder, str) and path.is_dir() and re.fullmatch(r"\w+", folder):
            tensors[name] = _read_folder(path / folder)
        else:
            data = cast(dict[str, Any], state).get("data")
            tensors[name] = _read_array(data, f"tensor {name} in {pickled}")
    return tensors


def _read_array(array: Any, what: str) -> Tensor:
    """Returns the values of a pickled numpy array."""
    state: Any = array.state if isinstance(array, _Array) else None
    if isinstance(state, tuple) and len(cast(tuple[Any, ...], state)) == 5:
        _, shape, kind, is_column_major, raw = cast(tuple[Any, ...], state)
        dtype = _find_element_type(kind)
        has_sizes = isinstance(shape, tuple) and all(
            type(size) is int for size in cast(tuple[Any, ...], shape)
        )
        if dtype and has_sizes and is_column_major is False and isinstance(raw, bytes):
            return _make_tensor(raw, dtype, cast(tuple[int, ...], shape), what)
    raise ValueError(f"{what} has no row-major values of a floating-point type")


def _find_element_type(kind: Any) -> torch.dtype | None:
    """Returns the type of a pickled numpy dtype; None unless it is a little-endian float."""
    state: Any = kind.state if isinstance(kind, _ElementType) else None
    if not isinstance(state, tuple):
        return None
    order = cast(tuple[Any, ...], state)[1:2]
    if not kind.arguments or order != ("<",):
        return None
    return _NUMPY_TYPES.get(str(kind.arguments[0]))


def _read_folder(folder: Path) -> Tensor:
    """Returns the tensor of a folder with `meta` and `out`."""
    meta = checked_file(folder, "meta").read_bytes()[:10_000].decode(errors="replace")
    found = _META.fullmatch(meta.strip() + "\n")
    if found is None or found[2] not in _META_TYPES:
        raise ValueError(f"{folder / 'meta'} describes no tensor of a floating-point type")
    shape = tuple(int(size) for size in re.findall(r"\d+", found[1]))
    raw = checked_file(folder, "out").read_bytes()
    return _make_tensor(raw, _META_TYPES[found[2]], shape, str(folder / "out"))


def _make_tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> Tensor:
    wanted = prod(shape) * dtype.itemsize
    if len(raw) != wanted or min(shape, default=1) < 1:
        raise ValueError(f"{what} has {len(raw):,} bytes; its shape {shape} needs {wanted:,}")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
