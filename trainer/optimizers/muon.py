"""Muon for whole matrices and for those that tensor parallelism, ZeRO or FSDP splits.

The update of a matrix is its momentum made orthogonal, which needs the whole matrix. Every matrix
is dealt to one rank. One all-to-all brings it there, the rank computes, and a second one brings
each rank its part of the update. So no product is computed twice, and the ranks share them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from ...mpu import ParallelMesh, Shard
from ...mpu.collectives import gather_bytes
from .whole_matrix import MatrixTile, ParameterGroup, ParameterPart, Range, WholeMatrixOptimizer

# The published iteration (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7


class Muon(WholeMatrixOptimizer):
    """Muon (Jordan et al. 2024) for the matrices of hidden layers, and AdamW for all else.

    On unsplit parameters it computes what `torch.optim.Muon` and `torch.optim.AdamW` do. The groups
    of a fused weight, such as [Q|K|V], are matrices of their own. A group of parameters with
    `is_hidden_matrix` gets Muon's update. It overwrites the gradients.

    Args:
        lr: The rate of both. With `scaling="match_rms_adamw"` (Liu et al. 2025, arXiv:2502.16982)
            the elements of an update are as large as AdamW's; with "original" a matrix [A, B] has
            the factor √max(1, A/B).
        momentum: That of Muon.
        betas, eps: Those of AdamW.
    """

    element_states = ("exp_avg", "exp_avg_sq", "momentum_buffer")

    def __init__(
        self,
        groups: Any,
        lr: float,
        *,
        momentum: float,
        scaling: str,
        betas: tuple[float, float],
        eps: float,
        mesh: ParallelMesh | None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "scaling": scaling,
            "betas": betas,
            "eps": eps,
            "weight_decay": 0.0,
            "is_hidden_matrix": False,
            "step": 0,
        }
        super().__init__(groups, defaults, mesh)
        self._group = _find_group(mesh)
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}

    def set_partitions(
        self,
        partitions: Mapping[Tensor, Sequence[tuple[Tensor, int]]],
        mesh: ParallelMesh | None,
        shard_group: dist.ProcessGroup | None,
    ) -> None:
        super().set_partitions(partitions, mesh, shard_group)
        self._group = _find_group(mesh)

    def list_element_states(self, group: ParameterGroup) -> tuple[str, ...]:
        if group["is_hidden_matrix"]:
            return ("momentum_buffer",)
        return ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            if group["is_hidden_matrix"]:
                self._update_matrices(group)
            else:
                self._update_by_adamw(group)

    def _update_by_adamw(self, group: ParameterGroup) -> None:
        tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
        means: list[Tensor] = []
        squares: list[Tensor] = []
        for tensor in tensors:
            state = self.state[tensor]
            for name in self.list_element_states(group):
                state.setdefault(name, torch.zeros_like(tensor))
            means.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
        beta1, beta2 = group["betas"]
        adamw(
            tensors,
            [tensor.grad for tensor in tensors],
            means,
            squares,
            [],
            [torch.tensor(float(group["step"] - 1)) for _ in tensors],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _update_matrices(self, group: ParameterGroup) -> None:
        parts = [part for _, part in self.collect_parts([group])]
        tensors = list(dict.fromkeys(part.tensor for part in parts))
        for tensor in tensors:
            momentum = self.state[tensor].setdefault("momentum_buffer", torch.zeros_like(tensor))
            momentum.lerp_(tensor.grad, 1 - group["momentum"])
            # Nesterov's: the gradient becomes the matrix that is made orthogonal.
            tensor.grad.lerp_(momentum, group["momentum"])
            tensor.mul_(1 - group["lr"] * group["weight_decay"])

        key = tuple(id(part) for part in parts)
        if key not in self._exchanges:
            self._exchanges[key] = MatrixExchange(parts, self._group)
        exchange = self._exchanges[key]
        for piece, update in exchange.run(_orthogonalize):
            rows, columns = exchange.shapes[piece.matrix]
            rate = group["lr"] * _find_scale(rows, columns, group["scaling"])
            piece.view_in(piece.tensor).add_(update, alpha=-rate)


def _find_group(mesh: ParallelMesh | None) -> dist.ProcessGroup | None:
    """Returns the ranks that share the products. Collective over the mesh."""
    if mesh is None or mesh.size("data", "context", "tensor") == 1:
        return None
    return mesh.group("data", "context", "tensor")


def _find_scale(rows: int, columns: int, scaling: str) -> float:
    if scaling == "original":
        return sqrt(max(1, rows / columns))
    return 0.2 * sqrt(max(rows, columns))


def _orthogonalize(matrix: Tensor) -> Tensor:
    """Returns about the nearest orthogonal matrix to a bf16 matrix [R, C], as torch.optim.Muon
    computes it: by five Newton-Schulz iterations in bf16.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


@dataclass(frozen=True)
class MatrixPiece:
    """A box of a matrix that a tensor of the optimizer has.

    Attributes:
        matrix: The number of the matrix.
        rows, columns: Where it is in the matrix.
        tensor: What the optimizer updates.
        tile: The box of a parameter that has the piece.
        inside: Where it is in the tile.
    """

    matrix: int
    rows: Range
    columns: Range
    tensor: Any
    tile: MatrixTile
    inside: tuple[int, slice, slice]

    def view_in(self, of: Tensor) -> Tensor:
        """Returns this piece of a tensor that is laid out like `tensor`, as a view [R', C']."""
        return self.tile.view_in(of)[self.inside]

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        return (self.matrix, *self.rows, *self.columns)


Place = tuple[int, int, int, int, int]  # matrix, rows from and to, columns from and to


class MatrixExchange:
    """Deals matrices to the ranks that compute with them, and brings pieces there and back.

    Attributes:
        shapes: Rows and columns of each matrix.
        owners: The rank in the group that computes with each matrix.

    Args:
        parts: The parameters, in the same order on all ranks of the group.
        group: The ranks that have pieces, or copies of them; None for this process alone.
    """

    def __init__(self, parts: Sequence[ParameterPart], group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._size = 1 if group is None else dist.get_world_size(group)
        self.shapes: list[tuple[int, int]] = []
        self._pieces: list[MatrixPiece] = []
        for part in parts:
            for box in _list_matrices(part):
                self._pieces += _find_pieces(part, box, len(self.shapes))
                self.shapes.append((box[1][1] - box[1][0], box[2][1] - box[2][0]))
        self.owners = deal_matrices(self.shapes, self._size)

        # What each rank has. Replicas have the same pieces: the first of them sends, all receive.
        self._places: list[list[Place]] = [[piece.place for piece in self._pieces]]
        if group is not None:
            own = json.dumps(self._places[0]).encode()
            self._places = []
            for found in gather_bytes(own, group):
                self._places.append([tuple(place) for place in json.loads(found)])
        senders: dict[Place, int] = {}
        for rank, places in enumerate(self._places):
            for place in places:
                senders.setdefault(place, rank)
        self._sent = [
            [place for place in places if senders[place] == rank]
            for rank, places in enumerate(self._places)
        ]
        self._by_place = {piece.place: piece for piece in self._pieces}

    def run(self, function: Callable[[Tensor], Tensor]) -> Iterator[tuple[MatrixPiece, Tensor]]:
        """Yields this rank's pieces with those of `function`'s results, bf16.

        Args:
            function: Is given each matrix of gradients in bf16, [R, C].
        """
        matrices = self._collect()
        results = {number: function(matrix) for number, matrix in matrices.items()}
        del matrices
        # Each owner sends the pieces of every rank, in that rank's order.
        outgoing: list[Tensor] = []
        sent: list[int] = []
        for places in self._places:
            own = [place for place in places if self.owners[place[0]] == self._rank]
            for number, top, bottom, left, right in own:
                outgoing.append(results[number][top:bottom, left:right].reshape(-1))
            sent.append(sum(_count(place) for place in own))
        order: list[Place] = []
        received: list[int] = []
        for owner in range(self._size):
            own = [place for place in self._places[self._rank] if self.owners[place[0]] == owner]
            order += own
            received.append(sum(_count(place) for place in own))
        values = self._exchange(outgoing, sent, received)
        sizes = [_count(place) for place in order]
        for place, value in zip(order, values.split(sizes), strict=True):
            piece = self._by_place[place]
            yield piece, value.view(place[2] - place[1], place[4] - place[3])

    def _collect(self) -> dict[int, Tensor]:
        """Returns the matrices of this rank, by number."""
        outgoing: list[Tensor] = []
        sent: list[int] = []
        for owner in range(self._size):
            own = [place for place in self._sent[self._rank] if self.owners[place[0]] == owner]
            for place in own:
                piece = self._by_place[place]
                outgoing.append(piece.view_in(piece.tensor.grad).reshape(-1).bfloat16())
            sent.append(sum(_count(place) for place in own))
        order: list[Place] = []
        received: list[int] = []
        for places in self._sent:
            own = [place for place in places if self.owners[place[0]] == self._rank]
            order += own
            received.append(sum(_count(place) for place in own))
        values = self._exchange(outgoing, sent, received)
        matrices: dict[int, Tensor] = {}
        for number, owner in enumerate(self.owners):
            if owner == self._rank:
                matrices[number] = values.new_empty(self.shapes[number])
        sizes = [_count(place) for place in order]
        for place, value in zip(order, values.split(sizes), strict=True):
            number, top, bottom, left, right = place
            box = matrices[number][top:bottom, left:right]
            box.copy_(value.view_as(box))
        return matrices

    def _exchange(self, outgoing: list[Tensor], sent: list[int], received: list[int]) -> Tensor:
        """Sends bf16 elements to each rank, and returns those of each rank one after another."""
        if outgoing:
            values = torch.cat(outgoing)
        else:
            device = self._pieces[0].tensor.device if self._pieces else None
            values = torch.empty(0, dtype=torch.bfloat16, device=device)
        if self._group is None:
            return values
        arrived = values.new_empty(sum(received))
        # As bytes, which every backend exchanges.
        cast(Any, dist).all_to_all_single(
            arrived.view(torch.uint8),
            values.view(torch.uint8),
            [2 * count for count in received],
            [2 * count for count in sent],
            group=self._group,
        )
        return arrived


def deal_matrices(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """Returns the rank of each matrix, so that the ranks have about equally many operations: the
    largest matrix first, each to the rank that has least.
    """
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    loads = [0] * ranks
    owners = [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda number: (-costs[number], number)):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += costs[number]
    return owners


def _count(place: Place) -> int:
    """Returns the number of elements of a piece."""
    return (place[2] - place[1]) * (place[4] - place[3])


def _list_matrices(part: ParameterPart) -> Iterator[tuple[Range, Range, Range]]:
    """Yields the matrices of a parameter [B, R, C], each as ranges of B (one), R and C."""
    count, rows, columns = part.shape
    ranges: list[list[Range]] = [[(0, rows)], [(0, columns)]]
    shard: Shard | None = getattr(part.owner, "shard", None)
    if shard is not None and len(shard.groups) > 1:
        axis = shard.dim - (len(shard.shape) - 2)
        if axis >= 0:
            edges = list(accumulate(shard.groups, initial=0))
            ranges[axis] = list(pairwise(edges))
    for number in range(count):
        for row_range in ranges[0]:
            for column_range in ranges[1]:
                yield (number, number + 1), row_range, column_range


def _find_pieces(
    part: ParameterPart, box: tuple[Range, Range, Range], matrix: int
) -> Iterator[MatrixPiece]:
    """Yields the pieces of a matrix that a rank has of a parameter."""
    for tile in part.tiles:
        bounds: list[Range] = []
        for (first, last), where in zip(box, tile.where, strict=True):
            bounds.append((max(first, where.start), min(last, where.stop)))
        if any(first >= last for first, last in bounds):
            continue
        inside: list[slice] = []
        for (first, last), where in zip(bounds, tile.where, strict=True):
            inside.append(slice(first - where.start, last - where.start))
        places: list[Range] = []
        for (first, last), (start, _) in zip(bounds[1:], box[1:], strict=True):
            places.append((first - start, last - start))
        where_inside = (inside[0].start, inside[1], inside[2])
        yield MatrixPiece(matrix, places[0], places[1], part.tensor, tile, where_inside)
