"""Reads and writes `<stem>_00.safetensors`, `<stem>_01.safetensors`, …: one file for each tensor-parallel rank.

Under pipeline parallelism the stages after the first write `<stem>_00_stage_01.safetensors`, ….
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..mpu import Shard
from .dtypes import from_torch_name
from .folder_files import stage_files
from .layout import ParameterSpec, place_by_rank
from .safetensors_header import make_header, read_header
from .stored_tensor import StoredTensor, index_by_name
from .tensor_reader import TensorReader, tensor_bytes, torch_dtype

OPTIMIZER = "optimizer"  # stem of the files with an optimizer's state, whose tensors are named KIND/PARAMETER
MASTER_WEIGHT = (
    "master_weight"  # the kind of the fp32 weights that an optimizer keeps of 16-bit parameters
)
CUT_ALIGNMENT = 64  # bytes; at least the largest element


def rank_file(folder: Path, stem: str, rank: int, stage: int = 0) -> Path:
    return folder / (
        f"{stem}_{rank:02d}" + (f"_stage_{stage:02d}" if stage else "") + ".safetensors"
    )


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that one data-parallel rank holds: consecutive elements of the flattened tensor.

    Attributes:
        shape: The shape of the whole tensor.
        start: The first element.
        values: The elements, in any shape; there may be none.
    """

    shape: tuple[int, ...]
    start: int
    values: Tensor


@dataclass(frozen=True)
class FileShare:
    """What one of several ranks writes of a safetensors file, at its place in the file.

    The file is the same for any number of ranks. Each writes its own bytes, so none needs the whole tensors.

    Attributes:
        header: The first bytes of the file; only for the first rank.
        offsets: The first byte of each piece in the file.
        pieces: Flat parts of the tensors, by name.
        whole: The names of the pieces that are whole tensors.
        cut: The bytes of the tensors that no rank has whole: name -> first byte and length.
    """

    header: bytes
    offsets: dict[str, int]
    pieces: dict[str, Tensor]
    whole: set[str]
    cut: dict[str, tuple[int, int]]


def share_of_file(
    tensors: Mapping[str, Tensor | TensorPart], share: int = 0, shares: int = 1
) -> FileShare:
    """Returns what rank `share` of `shares` writes of the file with these tensors.

    Every rank names the same tensors. Of those that all ranks hold, each rank writes equally many bytes; a
    `TensorPart` is written by the rank that has it. The bytes do not depend on the order of the tensors.
    """
    header, starts = make_header(
        {name: _stored_as(tensors[name]) for name in sorted(tensors)}, {"format": "pt"}
    )
    held = len(header) + sum(
        tensor.nbytes for tensor in tensors.values() if isinstance(tensor, Tensor)
    )
    edges = [
        min(held, -(-held * number // shares // CUT_ALIGNMENT) * CUT_ALIGNMENT)
        for number in range(shares + 1)
    ]
    found, before = FileShare(header if share == 0 else b"", {}, {}, set(), {}), len(header)
    for name in sorted(tensors, key=starts.__getitem__):
        tensor, at = tensors[name], starts[name]
        if isinstance(tensor, TensorPart):
            size, start, piece = (
                tensor.values.element_size(),
                tensor.start,
                tensor.values.reshape(-1),
            )
            found.cut[name] = at, prod(tensor.shape) * size
        else:
            # Larger elements come first, so `before` and the edges are multiples of this element's size.
            size, end = tensor.element_size(), before + tensor.nbytes
            start, stop = (
                min(max(edge, before), end) - before for edge in edges[share : share + 2]
            )
            start, piece = start // size, tensor.detach().reshape(-1)[start // size : stop // size]
            if any(before < edge < end for edge in edges):
                found.cut[name] = at, tensor.nbytes
            before = end
        if piece.numel() or (share == 0 and not prod(tensor.shape)):
            found.offsets[name], found.pieces[name] = at + start * size, piece
            if name not in found.cut:
                found.whole.add(name)
    return found


def _stored_as(tensor: Tensor | TensorPart) -> tuple[str, tuple[int, ...]]:
    dtype = tensor.values.dtype if isinstance(tensor, TensorPart) else tensor.dtype
    return from_torch_name(str(dtype)), tuple(tensor.shape)


def write_share(path: Path, share: FileShare) -> tuple[list[tuple[int, int]], str]:
    """Writes a rank's bytes of a file durably. Returns their ranges in the file, and their sha256 one after another.

    Ranks may write at the same time. Hashing and writing release the GIL, so other threads run.
    """
    digest, ranges = hashlib.sha256(), list[tuple[int, int]]()
    content = [(share.offsets[name], tensor_bytes(piece)) for name, piece in share.pieces.items()]
    content = sorted([(0, memoryview(share.header)), *content], key=lambda entry: entry[0])
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for start, data in content:
            if not len(data):
                continue
            digest.update(data)
            _write_all(descriptor, data, start)
            first = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((first, start + len(data)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return ranges, digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file of CPU tensors durably, in the place of any file before it."""
    path.unlink(missing_ok=True)
    write_share(path, share_of_file(tensors))


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, start)
        data, start = data[count:], start + count


def open_rank_files(folder: Path, stem: str) -> list[dict[str, StoredTensor]]:
    """Returns each rank's tensors by name, for as many ranks as there are files. ValueError if one is damaged."""
    size = sum("_stage_" not in path.name for path in folder.glob(f"{stem}_*.safetensors"))
    files = [stage_files(folder, rank_file(Path(), stem, rank).name) for rank in range(size)]
    return [
        index_by_name([tensor for path in paths for tensor in read_header(path)[0]])
        for paths in files
    ]


class ShardedReader:
    """Reads tensors that several ranks wrote, resharded for any other number of ranks.

    `ranks` has the stored tensors of each rank, and `shards` their split: a tensor without one is replicated.
    """

    def __init__(
        self, ranks: Sequence[Mapping[str, StoredTensor]], shards: Mapping[str, Shard | None]
    ) -> None:
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
        if shard is not None:
            shard.check(size)  # which also refuses a shard that not the tensor axis alone splits
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
