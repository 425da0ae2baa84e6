"""What will be copied from where to where, checked as a whole before the first byte is written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.layout import Layout, check_no_overlap, whole
from .copying import Copy
from .source_layout import MappedSource
from .target import Target


@dataclass(frozen=True)
class Plan:
    """copies: one for each parameter and extra tensor, in the order of the source's bytes."""

    mapped: MappedSource
    target: Target
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return sum(copy.nbytes for copy in self.copies)

    def fingerprint(self) -> str:
        """Equal for equal work on unchanged source files."""
        digest = hashlib.sha256(repr(self.copies).encode())
        for path, state in source_state(self.mapped.source.files).items():
            digest.update(f"{path}{state}".encode())
        return digest.hexdigest()


def make_plan(mapped: MappedSource, target: Target) -> Plan:
    """ValueError if the two sides do not hold the same tensors, each of them exactly once."""
    copies = compose(mapped.layout, target.layout)
    check_no_overlap(target.layout.tensors())
    return Plan(mapped, target, copies)


def compose(source: Layout, target: Layout) -> tuple[Copy, ...]:
    """A copy for every tensor of two layouts, which must place the same ones."""
    source.check()
    target.check()
    for kind, ours, theirs in (
        ("parameter", source.placements, target.placements),
        ("tensor", source.extras, target.extras),
    ):
        if differing := sorted(ours.keys() ^ theirs.keys()):
            raise ValueError(f"{kind} {differing[0]} is not on both sides")
    copies = []
    for name, placement in source.placements.items():
        goal = target.placements[name]
        if (placement.shape, placement.dim) != (goal.shape, goal.dim):
            raise ValueError(f"{name} is {placement.shape} on one side and {goal.shape} on the other")
        copies.append(Copy(name, placement, goal))
    for name, tensor in source.extras.items():
        goal_tensor = target.extras[name]
        if (tensor.dtype, tensor.shape) != (goal_tensor.dtype, goal_tensor.shape):
            raise ValueError(f"{tensor} is {tensor.dtype} {tensor.shape}, unlike {goal_tensor}")
        copies.append(Copy(name, whole(name, tensor), whole(name, goal_tensor)))
    return tuple(sorted(copies, key=_first_byte))


def _first_byte(copy: Copy) -> tuple[str, int]:
    tensor = copy.source.copies[0][0].tensor
    return str(tensor.file), tensor.offset


def source_state(files: list[Path]) -> Mapping[Path, tuple[int, int]]:
    """Size and time of change in nanoseconds of each file, by which a change is noticed."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
