"""The tensors of a checkpoint folder by name, type, shape and place; their bytes stay in the files."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .auto import read_config

MANIFEST = "manifest.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class StoredTensor:
    """dtype: None for a type that no parameter has. offset: of its first byte in the file, where it lies row-major.

    values: the tensor itself, for a format in which it has no place of its own.
    """

    name: str
    path: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offset: int = 0
    values: Tensor | None = None

    def __str__(self) -> str:
        return f"tensor {self.name} of {self.path}"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (self.dtype.itemsize if self.dtype else 0)


def huggingface_tensors(folder: Path) -> list[StoredTensor]:
    """All tensors of a Hugging Face folder: one file or several, safetensors or `.bin`.

    ValueError naming the file if there is none, one is missing or damaged, or the index does not fit the files.
    """
    for stem, suffix, read in (("model", "safetensors", read_safetensors), ("pytorch_model", "bin", read_torch_file)):
        single, index = folder / f"{stem}.{suffix}", folder / f"{stem}.{suffix}.index.json"
        if single.exists():
            return read(single)
        if index.exists():
            return _indexed(index, read)
    raise ValueError(
        f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor an index of several files"
    )


def native_tensors(folder: Path) -> list[list[StoredTensor]]:
    """The tensors of each rank's file of a shardzoo folder."""
    size = read_config(folder / MANIFEST).get("tensor_parallel_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{folder / MANIFEST} has tensor_parallel_size {size!r}, which must be 1 or more")
    return [read_safetensors(folder / f"rank_{rank:02d}.safetensors") for rank in range(size)]


def _indexed(index: Path, read) -> list[StoredTensor]:
    files = read_config(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index} has no weight_map of tensor names to file names")
    if outside := [name for name in files.values() if PurePosixPath(name).name != name]:
        raise ValueError(f"{index} names {outside[0]!r}, which is not a file of its folder")
    tensors = [tensor for name in sorted(set(files.values())) for tensor in read(index.parent / name)]
    for tensor in tensors:
        if files.get(tensor.name, tensor.path.name) != tensor.path.name:
            raise ValueError(f"{tensor} should be in {files[tensor.name]}, says {index}")
    if absent := sorted(files.keys() - {tensor.name for tensor in tensors}):
        raise ValueError(f"{index} names {', '.join(absent[:20])}, which {files[absent[0]]} does not have")
    return tensors


def read_safetensors(path: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file. ValueError if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt"):  # checks the header: lengths, offsets, overlaps, the file's size
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return [
        StoredTensor(
            name, path, _DTYPES.get(entry["dtype"]), tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    ]


def read_torch_file(path: Path) -> list[StoredTensor]:
    """The tensors of a state dictionary written by `torch.save`. No code of the file runs.

    Only where they are is read, except in the format from before torch 1.6, which is loaded whole. ValueError if
    the file is missing, damaged or more than named tensors.
    """
    try:
        zipped = path.open("rb").read(4) == b"PK\x03\x04"
        state = torch.load(path, map_location="meta" if zipped else "cpu", mmap=zipped, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is no readable file of tensors: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{path} must hold a dictionary of named tensors and nothing else")
    return list(located_tensors(path, state, zipped))


def located_tensors(path: Path, state: Mapping[str, Tensor], zipped: bool) -> Iterable[StoredTensor]:
    """The tensors that `torch.load` made on meta of a zipped file, or the loaded ones of an older one."""
    for name, tensor in state.items():
        dtype = tensor.dtype if tensor.dtype in _DTYPES.values() else None
        if not zipped:
            yield StoredTensor(name, path, dtype, tuple(tensor.shape), values=tensor)
            continue
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {name} of {path} is not contiguous; save it after .contiguous()")
        start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)  # set for tensors without storage
        if start is None:
            raise ValueError(f"torch {torch.__version__} does not tell where {name} is in {path}; use safetensors")
        offset = start + tensor.storage_offset() * tensor.element_size()
        yield StoredTensor(name, path, dtype, tuple(tensor.shape), offset)
