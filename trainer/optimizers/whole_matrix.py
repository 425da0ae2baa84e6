"""Describes the parts of matrices that a rank updates, for optimizers that need whole ones.

Tensor parallelism and ZeRO give an optimizer parts of parameters. Adafactor needs means over the
rows and columns of a whole matrix, and LAMB its norm. Each rank adds up its own part of the
statistics of all parameters in one buffer, which is summed over the ranks. So the number of
collectives does not depend on the number of parameters.

A matrix is one parameter of the model: a fused [Q|K|V] weight is a single one, and so is each
weight of a gated MLP. Padding enters no statistic and is not updated. A parameter of another shape
counts as B matrices of [R, C], from its last two dimensions; a vector is one matrix of [R, 1].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...mpu import ParallelMesh, Shard, tp_rank, tp_size

Range = tuple[int, int]  # [first, last)
ParameterGroup = dict[str, Any]


@dataclass(frozen=True)
class MatrixTile:
    """A box of a parameter that a tensor of the optimizer has: [B', R', C'] of the B matrices of
    [R, C].

    Attributes:
        offset: Where its first element is in the flat tensor.
        size: B', R', C'.
        strides: Those of the tensor.
        where: Its place in the whole parameter [B, R, C], without padding.
    """

    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    where: tuple[slice, ...]

    def view_in(self, tensor: Tensor, shift: int = 0) -> Tensor:
        """Returns this box of a contiguous tensor, or of one that begins `shift` elements later, as
        a view.
        """
        offset = tensor.storage_offset() + self.offset + shift
        return tensor.as_strided(self.size, self.strides, offset)

    @property
    def rows(self) -> tuple[slice, slice]:
        """Where its rows are in statistics of rows, [B, R]."""
        return self.where[0], self.where[1]

    @property
    def columns(self) -> tuple[slice, slice]:
        """Where its columns are in statistics of columns, [B, C]."""
        return self.where[0], self.where[2]


@dataclass(frozen=True)
class ParameterPart:
    """The part of a parameter that a tensor of the optimizer has.

    Attributes:
        owner: The key of the parameter's statistics in the optimizer's state.
        tensor: What the optimizer updates: the parameter, its fp32 copy, or ZeRO's share of many
            parameters.
        start: The place of the parameter's first element in `tensor`.
        shape: The whole parameter, without padding, as [B, R, C].
        counts: Whether this rank counts it. A parameter that is not split counts on one
            tensor-parallel rank.
    """

    owner: Tensor
    tensor: Any
    start: int
    shape: tuple[int, int, int]
    tiles: tuple[MatrixTile, ...]
    counts: bool

    def squared_norm(self, of: Tensor) -> Tensor:
        """Returns the squared 2-norm of this part of `of`, which is laid out like `tensor`; 0 if it
        does not count.
        """
        squares = []
        for tile in self.tiles if self.counts else ():
            # By rows: on a CPU, torch adds up the squares of 16 million fp32 numbers with an error
            # of 1e-3.
            row_norms = torch.linalg.vector_norm(tile.view_in(of), dim=-1)
            squares.append(row_norms.square().sum())
        return torch.stack(squares).sum() if squares else of.new_zeros(())


class WholeMatrixOptimizer(Optimizer):
    """The base of optimizers that need statistics of whole matrices, and get parts of them.

    Under ZeRO, `set_partitions` must precede the first step.

    Args:
        mesh: The model's.
    """

    element_states: tuple[str, ...] = ()
    """The states with a value for each element, which ZeRO splits like the parameter."""

    def __init__(self, groups: Any, defaults: dict[str, Any], mesh: ParallelMesh | None) -> None:
        super().__init__(groups, defaults)
        self._mesh = mesh
        self._shard_group: dist.ProcessGroup | None = None
        self._parts: dict[Tensor, list[ParameterPart]] = {}

    def set_partitions(
        self,
        partitions: Mapping[Tensor, Sequence[tuple[Tensor, int]]],
        mesh: ParallelMesh | None,
        shard_group: dist.ProcessGroup | None,
    ) -> None:
        """Tells which parameters ZeRO's flat partitions, or FSDP's rows, have.

        Args:
            partitions: For each flat tensor in a parameter group, all parameters of that group,
                with the place of their first element in the tensor: negative, or beyond its end, if
                other ranks have that element.
            shard_group: The ranks that together have each parameter; None if it is this one alone.
        """
        self._mesh = mesh
        self._shard_group = shard_group
        self._parts = {
            flat: [self._find_part(parameter, flat, start) for parameter, start in parameters]
            for flat, parameters in partitions.items()
        }

    def list_element_states(self, group: ParameterGroup) -> tuple[str, ...]:
        """Returns those of `element_states` that the tensors of a group have."""
        return self.element_states

    def collect_parts(
        self, groups: Sequence[ParameterGroup] | None = None
    ) -> list[tuple[ParameterGroup, ParameterPart]]:
        """Returns the parts with gradients and their groups: of the same parameters, in one order,
        on all ranks.

        Args:
            groups: Some of the parameter groups; by default all.
        """
        found = []
        for group in self.param_groups if groups is None else groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                tensor.grad = tensor.grad.contiguous()
                if tensor not in self._parts:
                    self._parts[tensor] = [self._find_part(tensor, tensor, 0)]
                found += [(group, part) for part in self._parts[tensor]]
        return found

    def sum_over_parts(self, values: Tensor) -> Tensor:
        """Returns the sum over the ranks that have other parts of the parameters."""
        mesh = self._mesh
        if mesh is None or mesh.world_size == 1:
            return values
        total = values.to(mesh.device_type)
        if mesh.tp_size > 1:
            cast(Any, dist).all_reduce(total, group=mesh.tp_group)
        if self._shard_group is not None:
            cast(Any, dist).all_reduce(total, group=self._shard_group)
        return total.to(values.device)

    def _find_part(self, parameter: Tensor, tensor: Tensor, start: int) -> ParameterPart:
        shard: Shard | None = getattr(parameter, "shard", None)
        first = max(0, -start)
        last = min(parameter.numel(), tensor.numel() - start)
        shape = tuple(parameter.shape)
        tiles = _find_tiles(shape, shard, (first, last), start, self._mesh)
        whole = matrix_shape(shard.shape if shard else shape)
        counts = shard is not None or tp_rank(self._mesh) == 0
        return ParameterPart(parameter, tensor, start, whole, tuple(tiles), counts)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns a parameter's shape as that of matrices [B, R, C]."""
    if len(shape) < 2:
        return 1, prod(shape), 1
    rows, columns = shape[-2:]
    return prod(shape[:-2]), rows, columns


def _find_tiles(
    shape: tuple[int, ...], shard: Shard | None, held: Range, start: int, mesh: ParallelMesh | None
) -> Iterator[MatrixTile]:
    """Yields the tiles, without padding, of the elements `held` of a rank's parameter that a tensor
    has.

    Args:
        shape: That of the parameter on this rank.
        start: The place in the tensor of the parameter's first element.
    """
    matrices = matrix_shape(shape)
    _, rows, columns = matrices
    strides = (rows * columns, columns, 1)

    # Of the axis of [B, R, C] that is split: each range of this rank's parameter, and where it
    # begins in the whole.
    axis = 0
    pieces: list[tuple[Range, int]] = [((0, matrices[0]), 0)]
    if shard is not None:
        axis, pieces = _find_split_ranges(shape, shard, mesh)

    # A flat range of elements is a few boxes of [B, R, C], and each piece of the split axis cuts a
    # part out of them.
    for box in find_boxes(*held, matrices):
        for (piece_first, piece_last), place in pieces:
            first = max(piece_first, box[axis][0])
            last = min(piece_last, box[axis][1])
            if first >= last:
                continue
            inside = [*box]
            inside[axis] = (first, last)
            offset = start
            for bounds, stride in zip(inside, strides, strict=True):
                offset += bounds[0] * stride
            where = [slice(*bounds) for bounds in inside]
            where[axis] = slice(first - piece_first + place, last - piece_first + place)
            size = tuple(end - begin for begin, end in inside)
            yield MatrixTile(offset, size, strides, tuple(where))


def _find_split_ranges(
    shape: tuple[int, ...], shard: Shard, mesh: ParallelMesh | None
) -> tuple[int, list[tuple[Range, int]]]:
    """Returns the axis of [B, R, C] that a shard splits, and each of this rank's ranges with its
    begin in the whole.
    """
    dimensions_behind = len(shape) - 1 - shard.dim
    axis = max(2 - dimensions_behind, 0) if len(shape) > 1 else 1
    # Dimensions before the last two are one axis, of which an index of the split dimension is
    # several.
    width = prod(shape[shard.dim + 1 : -2]) if axis == 0 else 1
    pieces = []
    local = 0
    for first, last in shard.ranges(tp_rank(mesh), tp_size(mesh)):
        length = (last - first) * width
        pieces.append(((local, local + length), first * width))
        local += length
    return axis, pieces


def find_boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[Range, ...]]:
    """Yields the boxes of which the elements [start, stop) of a contiguous tensor consist, in
    order.

    For example, elements 3 to 14 of a tensor [4, 5] are the end of row 0, the whole row 1, and the
    begin of row 2.
    """
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    while start < stop:
        first, before = divmod(start, inner)
        if before or stop - start < inner:
            # A part of index `first`.
            end = min(stop - first * inner, inner)
            for box in find_boxes(before, end, shape[1:]):
                yield ((first, first + 1), *box)
            start = first * inner + end
        else:
            # As many whole indices as there are.
            last = stop // inner
            yield ((first, last), *((0, length) for length in shape[1:]))
            start = last * inner
