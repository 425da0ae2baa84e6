"""Tensors split over `<stem>_00.safetensors`, `<stem>_01.safetensors`, …: one file for each tensor-parallel rank."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..mpu import Shard


def rank_file(folder: Path, stem: str, rank: int) -> Path:
    return folder / f"{stem}_{rank:02d}.safetensors"


def write_rank_file(folder: Path, stem: str, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Writes one rank's tensors durably and returns the sha256 of each one's bytes."""
    cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path = rank_file(folder, stem, rank)
    save_file(cpu, path, metadata={"format": "pt"})
    with path.open("rb") as written:
        os.fsync(written.fileno())
    return {name: hashlib.sha256(tensor_bytes(tensor)).hexdigest() for name, tensor in cpu.items()}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class ShardedReader:
    """Reads tensors that were written by `size` ranks, whole or as a rank of any other size wants them.

    shards: how each tensor is split; a tensor that is missing there or None is replicated.
    """

    def __init__(self, folder: Path, stem: str, size: int, shards: Mapping[str, Shard | None]) -> None:
        self.size = size
        self._shards = shards
        self._paths = [rank_file(folder, stem, rank) for rank in range(size)]
        if missing := [str(path) for path in self._paths if not path.exists()]:
            raise ValueError(f"{folder} lacks {', '.join(missing)}: it was written by {size} ranks")
        self._files = [safe_open(path, framework="pt") for path in self._paths]

    def names(self) -> list[str]:
        return list(self._files[0].keys())

    def is_scalar(self, name: str) -> bool:
        return not self._files[0].get_slice(name).get_shape()

    def full(self, name: str) -> Tensor:
        """The unsplit tensor, without padding."""
        shard = self._shards.get(name)
        if shard is None:
            return self._part(name, 0)
        return shard.merge([self._part(name, rank) for rank in range(self.size)])

    def local(self, name: str, rank: int, size: int) -> Tensor:
        """What rank `rank` of `size` holds."""
        shard = self._shards.get(name)
        if shard is None or size == self.size:
            return self._part(name, rank % self.size)
        return shard.slice(self.full(name), rank, size)

    def _part(self, name: str, rank: int) -> Tensor:
        if name not in self._files[rank].keys():  # noqa: SIM118 - not a dictionary
            raise ValueError(f"{self._paths[rank]} has no tensor {name}")
        return self._files[rank].get_tensor(name)
