"""Reads and writes `<stem>_00.safetensors`, `<stem>_01.safetensors`, …: one file for each rank.

The ranks are tensor-parallel ones. Under pipeline parallelism the stages after the first write
`<stem>_00_stage_01.safetensors`, …. A file may be written by several data-parallel ranks together.
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
from ..mpu.shard import PerAxis
from .dtypes import from_torch_name
from .folder_files import find_stage_files
from .layout import ParameterSpec, place_by_rank
from .planned_file import METADATA
from .safetensors_header import make_header, read_header
from .stored_tensor import StoredTensor, index_by_name
from .tensor_reader import TensorReader, tensor_bytes, torch_dtype

# The stem of the files with an optimizer's state, whose tensors are named KIND/PARAMETER.
OPTIMIZER = "optimizer"
# The kind of the fp32 weights that an optimizer keeps of 16-bit parameters.
MASTER_WEIGHT = "master_weight"
CUT_ALIGNMENT = 64  # bytes; at least the largest element


def rank_file(folder: Path, stem: str, rank: int, stage: int = 0) -> Path:
    suffix = f"_stage_{stage:02d}" if stage else ""
    return folder / f"{stem}_{rank:02d}{suffix}.safetensors"


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that one data-parallel rank holds.

    It consists of consecutive elements of the flattened tensor.

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

    The file is the same for any number of ranks. Each writes its own bytes, so none needs the whole
    tensors.

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


def divide_file(
    tensors: Mapping[str, Tensor | TensorPart], share: int = 0, shares: int = 1
) -> FileShare:
    """Returns what rank `share` of `shares` writes of the file with these tensors.

    Every rank names the same tensors. Of those that all ranks hold, each rank writes equally many
    bytes; a `TensorPart` is written by the rank that has it. The bytes do not depend on the order
    of the tensors.
    """
    types = {name: _describe_type(tensors[name]) for name in sorted(tensors)}
    header, starts = make_header(types, METADATA)

    # The header and the tensors that all ranks hold are cut into equal shares, as if these tensors
    # followed one another without the parts between them.
    held = len(header)
    for tensor in tensors.values():
        if isinstance(tensor, Tensor):
            held += tensor.nbytes
    edges: list[int] = []
    for number in range(shares + 1):
        edge = -(-held * number // shares // CUT_ALIGNMENT) * CUT_ALIGNMENT
        edges.append(min(held, edge))

    result = FileShare(header if share == 0 else b"", {}, {}, set(), {})
    position = len(header)  # of a tensor among those that all ranks hold
    for name in sorted(tensors, key=starts.__getitem__):
        tensor = tensors[name]
        if isinstance(tensor, TensorPart):
            itemsize = tensor.values.element_size()
            first_element = tensor.start
            piece = tensor.values.reshape(-1)
            result.cut[name] = (starts[name], prod(tensor.shape) * itemsize)
        else:
            # Larger elements come first, so the position and the edges are multiples of this
            # tensor's element size.
            itemsize = tensor.element_size()
            end = position + tensor.nbytes
            first_byte = min(max(edges[share], position), end) - position
            last_byte = min(max(edges[share + 1], position), end) - position
            first_element = first_byte // itemsize
            piece = tensor.detach().reshape(-1)[first_element : last_byte // itemsize]
            if any(position < edge < end for edge in edges):
                result.cut[name] = (starts[name], tensor.nbytes)
            position = end
        # The first rank lists tensors without elements.
        if piece.numel() or (share == 0 and not prod(tensor.shape)):
            result.offsets[name] = starts[name] + first_element * itemsize
            result.pieces[name] = piece
            if name not in result.cut:
                result.whole.add(name)
    return result


def _describe_type(tensor: Tensor | TensorPart) -> tuple[str, tuple[int, ...]]:
    """Returns safetensors' name of the type, and the shape of the whole tensor."""
    values = tensor.values if isinstance(tensor, TensorPart) else tensor
    return from_torch_name(str(values.dtype)), tuple(tensor.shape)


def write_share(path: Path, share: FileShare) -> tuple[list[tuple[int, int]], str]:
    """Writes a rank's bytes of a file durably.

    Ranks may write at the same time. Hashing and writing release the GIL, so other threads run.

    Returns:
        The ranges of these bytes in the file, and their sha256 one after another.
    """
    blocks = [(0, memoryview(share.header))]
    for name, piece in share.pieces.items():
        blocks.append((share.offsets[name], tensor_bytes(piece)))
    blocks.sort(key=lambda block: block[0])

    digest = hashlib.sha256()
    ranges: list[tuple[int, int]] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for start, data in blocks:
            if not len(data):
                continue
            digest.update(data)
            _write_all(descriptor, data, start)
            stop = start + len(data)
            # Blocks that touch become one range.
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return ranges, digest.hexdigest()


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, start)
        data = data[count:]
        start += count


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file of CPU tensors durably, in the place of any file before it."""
    path.unlink(missing_ok=True)
    write_share(path, divide_file(tensors))


def open_rank_files(folder: Path, stem: str) -> list[dict[str, StoredTensor]]:
    """Returns each rank's tensors by name, for as many ranks as there are files.

    Raises:
        ValueError: A file is damaged.
    """
    size = sum("_stage_" not in path.name for path in folder.glob(f"{stem}_*.safetensors"))
    files = [find_stage_files(folder, rank_file(Path(), stem, rank).name) for rank in range(size)]
    ranks: list[dict[str, StoredTensor]] = []
    for paths in files:
        tensors: list[StoredTensor] = []
        for path in paths:
            tensors += read_header(path)[0]
        ranks.append(index_by_name(tensors))
    return ranks


class ShardedReader:
    """Reads tensors that several ranks wrote, resharded for any other number of ranks.

    Args:
        ranks: The stored tensors of each rank, by name.
        shards: How they are split; a tensor without a shard is replicated.
    """

    def __init__(
        self, ranks: Sequence[Mapping[str, StoredTensor]], shards: Mapping[str, Shard | None]
    ) -> None:
        self._ranks = ranks
        self._shards = shards
        self._reader = TensorReader()

    def __enter__(self) -> ShardedReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.__exit__(*exception)

    def read_part(self, name: str, rank: PerAxis, size: PerAxis) -> Tensor:
        """Returns the part of a tensor that rank `rank` of `size` holds.

        Args:
            rank, size: Along the tensor axis, or by axis: then a part of the experts may be asked
                for.

        Raises:
            ValueError: The files do not have it.
        """
        shard = self._shards.get(name)
        written_size = len(self._ranks)
        tensors = [self._find(name, written) for written in range(written_size)]
        if shard is not None and [split.axis for split in shard.splits] == ["expert"]:
            # Every file has all experts.
            return shard.slice(self._reader.whole(tensors[0]), rank, size)
        if shard is not None:
            # This also refuses a shard that not the tensor axis alone splits.
            shard.check(size)
        tensor_rank = rank if isinstance(rank, int) else rank["tensor"]
        tensor_size = size if isinstance(size, int) else size["tensor"]
        takes_experts = shard is not None and shard.is_nested and not isinstance(size, int)
        if shard is None or (tensor_size == written_size and not takes_experts):
            return self._reader.whole(tensors[tensor_rank % written_size])
        spec = ParameterSpec(name, shard.shape, shard)
        placement = place_by_rank({name: spec}, [{name: tensor} for tensor in tensors])[name]
        placement.check()
        part = torch.zeros(shard.local_shape(rank, size), dtype=torch_dtype(tensors[0]))
        ranges = spec.ranges(tensor_rank, tensor_size)
        if takes_experts:
            ranges = tuple(shard.ranges(rank, size))
        self._reader.fill(placement, ranges, part)
        return part

    def _find(self, name: str, rank: int) -> StoredTensor:
        tensors = self._ranks[rank]
        if name not in tensors:
            raise ValueError(f"{next(iter(tensors.values())).file} has no tensor {name}")
        return tensors[name]
