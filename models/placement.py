"""Where a checkpoint keeps the parts of each native parameter, and which of them a rank needs."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ..mpu import Shard
from .common.name_map import Match
from .files import StoredTensor


@dataclass(frozen=True)
class Part:
    """[start, stop) of a parameter along its split dimension (0 if replicated), as `tensor` holds it.

    position: where in the tensor it starts. transposed: the tensor is stored with its two dimensions swapped.
    """

    tensor: StoredTensor
    start: int
    stop: int
    position: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class Placement:
    """A parameter's full shape and split, and the parts that together are the parameter."""

    name: str
    shape: tuple[int, ...]
    shard: Shard | None
    parts: tuple[Part, ...]

    @property
    def dim(self) -> int:
        return self.shard.dim if self.shard else 0

    def wanted(self, rank: int, size: int) -> Iterator[tuple[Part, int, int, int]]:
        """What a rank must read: part, [first, last) along the tensor's dimension, and where it goes locally."""
        local = 0
        ranges = self.shard.ranges(rank, size) if self.shard else [(0, self.shape[0])]
        for start, stop in ranges:
            for part in self.parts:
                low, high = max(start, part.start), min(stop, part.stop)
                if low < high:
                    first = part.position + low - part.start
                    yield part, first, first + high - low, local + low - start
            local += stop - start


def place_huggingface(model: nn.Module, match: Match, tensors: Mapping[str, StoredTensor]) -> list[Placement]:
    """By the name map. ValueError naming every tensor whose shape does not fit."""
    placements, problems = [], []
    layout = parameter_layout(model)
    for name, entry in match.entries.items():
        shape, shard = layout[name]
        stored = [tensors[match.sources[source]] for source in entry.stored_names()]
        dim = shard.dim if shard else 0
        lengths = (shard.groups if shard and len(stored) > 1 else None) or (shape[dim],)
        start, parts = 0, []
        for tensor, length in zip(stored, lengths, strict=True):
            expected = (*shape[:dim], length, *shape[dim + 1 :])
            check_shape(tensor, expected[::-1] if entry.transpose else expected, name, problems)
            parts.append(Part(tensor, start, start + length, 0, entry.transpose))
            start += length
        placements.append(Placement(name, shape, shard, tuple(parts)))
    if problems:
        raise ValueError("; ".join(problems))
    return placements


def place_native(
    model: nn.Module, ranks: list[dict[str, StoredTensor]], absent: Container[str] = ()
) -> list[Placement]:
    """By each rank's `Shard`; replicated parameters are taken from the first rank's file. ValueError naming every
    tensor that is missing, of no parameter, or of a shape that does not fit.

    absent: names that are left aside, in the model and in the files."""
    layout = {name: place for name, place in parameter_layout(model).items() if name not in absent}
    problems: list[str] = []
    for rank, everything in enumerate(ranks):
        tensors = [name for name in everything if name not in absent]
        problems += [f"rank {rank} lacks {name}" for name in layout if name not in tensors]
        problems += [f"rank {rank} has {name}, which the model does not have" for name in tensors if name not in layout]
    if problems:
        raise ValueError(f"the checkpoint is wrong: {'; '.join(problems[:20])}")
    placements = []
    for name, (shape, shard) in layout.items():
        parts = []
        if shard is None:
            check_shape(ranks[0][name], shape, name, problems)
            parts.append(Part(ranks[0][name], 0, shape[0]))
        for rank in range(len(ranks) if shard else 0):
            assert shard is not None
            check_shape(ranks[rank][name], shard.local_shape(len(ranks)), name, problems)
            position = 0
            for start, stop in shard.ranges(rank, len(ranks)):
                parts.append(Part(ranks[rank][name], start, stop, position))
                position += stop - start
        placements.append(Placement(name, shape, shard, tuple(parts)))
    if problems:
        raise ValueError("; ".join(problems))
    return placements


def parameter_layout(model: nn.Module) -> dict[str, tuple[tuple[int, ...], Shard | None]]:
    """Each parameter's full shape, without padding, and its split."""
    layout = {}
    for name, parameter in model.named_parameters():
        shard: Shard | None = getattr(parameter, "shard", None)
        layout[name] = (shard.shape if shard else tuple(parameter.shape), shard)
    return layout


def check_shape(tensor: StoredTensor, expected: tuple[int, ...], name: str, problems: list[str]) -> None:
    if tensor.shape != expected:
        problems.append(f"{tensor} has shape {list(tensor.shape)}, but {name} needs {list(expected)}")
    elif tensor.dtype is None:
        problems.append(f"{tensor} is not of floating-point numbers, but {name} needs them")
