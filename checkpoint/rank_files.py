"""Reads and writes `<stem>_00.safetensors`, `<stem>_01.safetensors`, …: one file for each tensor-parallel rank.

Under pipeline parallelism the stages after the first write `<stem>_00_stage_01.safetensors`, ….
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ..mpu import Shard
from .dtypes import from_torch_name
from .folder_files import stage_files
from .layout import ParameterSpec, place_by_rank
from .safetensors_header import make_header, read_header
from .stored_tensor import StoredTensor, index_by_name
from .tensor_reader import TensorReader, tensor_bytes, torch_dtype


def rank_file(folder: Path, stem: str, rank: int, stage: int = 0) -> Path:
    return folder / (f"{stem}_{rank:02d}" + (f"_stage_{stage:02d}" if stage else "") + ".safetensors")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file of CPU tensors durably and returns its sha256.

    The bytes do not depend on the order of the tensors. Hashing and writing release the GIL, so other threads run.
    """
    layout = {name: (from_torch_name(str(tensors[name].dtype)), tuple(tensors[name].shape)) for name in sorted(tensors)}
    header, offsets = make_header(layout, {"format": "pt"})
    digest = hashlib.sha256(header)
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(header))
        for name in sorted(tensors, key=offsets.__getitem__):
            data = tensor_bytes(tensors[name])
            digest.update(data)
            _write_all(file, data)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _write_all(file: IO[bytes], data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def open_rank_files(folder: Path, stem: str) -> list[dict[str, StoredTensor]]:
    """Returns each rank's tensors by name, for as many ranks as there are files. ValueError if one is damaged."""
    size = sum("_stage_" not in path.name for path in folder.glob(f"{stem}_*.safetensors"))
    files = [stage_files(folder, rank_file(Path(), stem, rank).name) for rank in range(size)]
    return [index_by_name([tensor for path in paths for tensor in read_header(path)[0]]) for paths in files]


class ShardedReader:
    """Reads tensors that several ranks wrote, resharded for any other number of ranks.

    `ranks` has the stored tensors of each rank, and `shards` their split: a tensor without one is replicated.
    """

    def __init__(self, ranks: Sequence[Mapping[str, StoredTensor]], shards: Mapping[str, Shard | None]) -> None:
        self._ranks, self._shards = ranks, shards
        self._reader = TensorReader()

    def __enter__(self) -> ShardedReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.__exit__(*exception)

    def local(self, name: str, rank: int, size: int) -> Tensor:
        """Returns the part of a tensor that rank `rank` of `size` holds. ValueError if the files do not have it."""
        shard, written = self._shards.get(name), len(self._ranks)
        tensors = [self._tensor(name, number) for number in range(written)]
        if shard is None or size == written:
            return self._reader.whole(tensors[rank % written])
        spec = ParameterSpec(name, shard.shape, shard)
        placement = place_by_rank({name: spec}, [{name: tensor} for tensor in tensors])[name]
        placement.check()
        part = torch.zeros(shard.local_shape(rank, size), dtype=torch_dtype(tensors[0]))
        self._reader.fill(placement, spec.ranges(rank, size), part)
        return part

    def _tensor(self, name: str, rank: int) -> StoredTensor:
        if name not in self._ranks[rank]:
            raise ValueError(f"{next(iter(self._ranks[rank].values())).file} has no tensor {name}")
        return self._ranks[rank][name]
