"""Tensors of a file written by `torch.save`, by their place in it. No code of the file runs.

`torch.load(weights_only=True)` builds tensors without storage; each remembers where in the file its bytes lie.
"""

from __future__ import annotations

import bisect
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .dtypes import from_torch_name
from .stored_tensor import StoredTensor

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip record: lengths of its name and extra field


def load_without_storage(path: Path) -> Any:
    """What the file holds, with every tensor on the meta device. ValueError if that needs any unknown class."""
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is not in the zip format that torch writes since version 1.6, or it is truncated; an older file "
            f"is rewritten by torch.save(torch.load(path, weights_only=True), path)"
        )
    Records(path)  # before torch.load, which crashes on tensors of the other byte order
    try:
        with only_placeholder_types():
            return torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        what = f"a {foreign[1]}" if foreign else "what only code could build"
        raise ValueError(f"{path} is refused: besides tensors and plain values it holds {what}") from None
    except (RuntimeError, OSError, EOFError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {str(error).splitlines()[0] if str(error) else error!r}") from None


def locate_tensors(path: Path, state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of a state dictionary that `load_without_storage` read from `path`."""
    records = Records(path)
    tensors = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path}: {name!r} is a {type(tensor).__name__}, but weights are named tensors")
        where = f"tensor {name} in {path}"
        if tensor.numel() and not tensor.is_contiguous():
            raise ValueError(f"{where} is not contiguous; save it after .contiguous()")
        dtype = from_torch_name(str(tensor.dtype))
        start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if start is None and tensor.numel():
            raise ValueError(f"{where} has no bytes in the file")
        offset = (start or 0) + int(tensor.storage_offset()) * tensor.element_size()
        stored = StoredTensor(name, path, dtype, tuple(tensor.shape), offset)
        if tensor.numel() and not records.contain(start or 0, offset + stored.nbytes):
            raise ValueError(f"{where} claims bytes outside its record of the file")
        tensors[name] = stored
    return tensors


class Records:
    """Where the records of a zip file start and stop. ValueError if it is damaged, or not as torch writes it."""

    def __init__(self, path: Path) -> None:
        self._stops = {}
        try:
            with zipfile.ZipFile(path) as archive, path.open("rb") as file:
                for info in archive.infolist():
                    if info.compress_type != zipfile.ZIP_STORED:
                        raise ValueError(f"{path} is compressed, which torch.save does not do")
                    if info.filename.endswith("/byteorder") and archive.read(info) != b"little":
                        raise ValueError(f"{path} was written on a big-endian machine")
                    file.seek(info.header_offset)
                    name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                    start = info.header_offset + _LOCAL_HEADER.size + name + extra
                    self._stops[start] = start + info.file_size
        except (zipfile.BadZipFile, struct.error, OSError, NotImplementedError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        self._starts = sorted(self._stops)

    def contain(self, start: int, stop: int) -> bool:
        position = bisect.bisect_right(self._starts, start) - 1
        return position >= 0 and self._starts[position] == start and stop <= self._stops[start]


# Arguments, random states, loss scalers: what lies beside the weights.
PLACEHOLDER_TYPES = (
    "argparse.Namespace",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "fp16.loss_scaler.DynamicLossScaler",
    "fp16.loss_scaler.LossScaler",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
)


class PlaceholderObject:
    """Stands for an object that is of no interest here; takes and forgets what the original takes."""

    def __new__(cls, *args: object, **kwargs: object) -> PlaceholderObject:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


@contextmanager
def only_placeholder_types() -> Iterator[None]:
    """Lets `torch.load` take those types as `PlaceholderObject` and no others, whatever libraries have allowed."""
    allowed_by_others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(PlaceholderObject, name) for name in PLACEHOLDER_TYPES])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed_by_others)
