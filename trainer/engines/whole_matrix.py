"""Adafactor and LAMB for parameters that tensor parallelism or ZeRO splits: their statistics are of whole parameters.

A matrix here is one parameter of the model: a fused [Q|K|V] weight is a single one, and so is each weight of a gated
MLP. Padding enters no statistic and is not updated. Each rank adds up its parts of the statistics of all parameters in
one buffer, which is summed over the ranks; so their number of collectives does not depend on the number of parameters.
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

Range = tuple[int, int]
Group = dict[str, Any]


@dataclass(frozen=True)
class Tile:
    """A box of a parameter that a tensor holds: [B', R', C'] of the parameter as B matrices of [R, C].

    Attributes:
        offset, size, strides: Its place in the flat tensor.
        where: Its place in the whole parameter, without padding.
    """

    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    where: tuple[slice, ...]

    def of(self, tensor: Tensor, shift: int = 0) -> Tensor:
        """Returns the tile of a contiguous tensor, or of one that begins `shift` elements later, as a view."""
        return tensor.as_strided(
            self.size, self.strides, tensor.storage_offset() + self.offset + shift
        )


@dataclass(frozen=True)
class Part:
    """The part of a parameter that a tensor of the optimizer holds.

    Attributes:
        owner: The key of the parameter's statistics in the optimizer's state.
        tensor: What the optimizer updates: the parameter, its fp32 copy, or ZeRO's share of many parameters.
        start: The place of the parameter's first element in `tensor`.
        shape: The whole parameter, without padding, as B matrices of [R, C]; a vector is one of [R, 1].
        counts: Whether this rank counts it. A parameter that is not split counts on one tensor-parallel rank.
    """

    owner: Tensor
    tensor: Any
    start: int
    shape: tuple[int, int, int]
    tiles: tuple[Tile, ...]
    counts: bool

    def squared_norm(self, of: Tensor) -> Tensor:
        """Returns the squared 2-norm of this part of `of`, which is laid out like `tensor`; 0 if it does not count."""
        tiles = self.tiles if self.counts else ()
        # By rows: on a CPU, torch adds up the squares of 16 million fp32 numbers with an error of 1e-3.
        squares = [torch.linalg.vector_norm(tile.of(of), dim=-1).square().sum() for tile in tiles]
        return torch.stack(squares).sum() if squares else of.new_zeros(())


Work = tuple[Group, Part]


class WholeMatrixOptimizer(Optimizer):
    """Base of the optimizers here. `mesh` is the model's; under ZeRO, `set_partitions` must precede the first step."""

    element_states: tuple[str, ...] = ()
    """The states with a value for each element, which ZeRO splits like the parameter."""

    def __init__(self, groups: Any, defaults: dict[str, Any], mesh: ParallelMesh | None) -> None:
        super().__init__(groups, defaults)
        self._mesh, self._over_replicas = mesh, False
        self._parts: dict[Tensor, list[Part]] = {}

    def set_partitions(
        self, partitions: Mapping[Tensor, Sequence[tuple[Tensor, int]]], mesh: ParallelMesh | None
    ) -> None:
        """Tells which parameters ZeRO's flat partitions hold.

        Args:
            partitions: For each flat tensor in a parameter group, all parameters of that group, with the place of
                their first element in the tensor: negative, or beyond its end, if other ranks hold that element.
        """
        self._mesh, self._over_replicas = mesh, True
        self._parts = {
            flat: [self._part(parameter, flat, start) for parameter, start in parameters]
            for flat, parameters in partitions.items()
        }

    def _part(self, parameter: Tensor, tensor: Tensor, start: int = 0) -> Part:
        shard: Shard | None = getattr(parameter, "shard", None)
        held = (max(0, -start), min(parameter.numel(), tensor.numel() - start))
        tiles = _tiles(tuple(parameter.shape), shard, held, start, self._mesh)
        counts = shard is not None or tp_rank(self._mesh) == 0
        shape = _matrices(shard.shape if shard else parameter.shape)
        return Part(parameter, tensor, start, shape, tuple(tiles), counts)

    def _work(self) -> list[Work]:
        """Returns the parts with gradients, and their groups: of the same parameters in the same order on all ranks."""
        work = []
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                tensor.grad = tensor.grad.contiguous()
                if tensor not in self._parts:
                    self._parts[tensor] = [self._part(tensor, tensor)]
                work += [(group, part) for part in self._parts[tensor]]
        return work

    def _sum(self, values: Tensor) -> Tensor:
        """Returns the sum over the ranks that hold other parts of the parameters."""
        mesh = self._mesh
        if mesh is None or mesh.world_size == 1:
            return values
        total = values.to(mesh.device_type)
        if mesh.tp_size > 1:
            cast(Any, dist).all_reduce(total, group=mesh.tp_group)
        if self._over_replicas and mesh.dp_size > 1:
            cast(Any, dist).all_reduce(total, group=mesh.dp_group)
        return total.to(values.device)


class Adafactor(WholeMatrixOptimizer):
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 and 5), without a first moment.

    It computes what transformers' class of the same name does on an unsplit parameter, and keeps the same states: the
    means over columns and rows of the squared gradients, of whole matrices and the same on all ranks; and the squared
    gradients of vectors, split like the vectors. It overwrites the gradients.
    """

    def __init__(
        self,
        groups: Any,
        lr: float | None,
        *,
        relative_step: bool,
        scale_parameter: bool,
        mesh: ParallelMesh | None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": None,
        }
        defaults |= {"weight_decay": 0.0, "scale_parameter": scale_parameter}
        super().__init__(
            groups, {**defaults, "relative_step": relative_step, "warmup_init": relative_step}, mesh
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        work = self._work()
        if not work:
            return
        for (group, part), sums in zip(work, self._statistics(work), strict=True):
            self._precondition(group, part, *sums)
        norms = self._sum(torch.stack([part.squared_norm(part.tensor.grad) for _, part in work]))
        for (group, part), squares in zip(work, norms, strict=True):
            rate = _rate(group, self.state[part.owner])
            rms = (squares / prod(part.shape)).sqrt()
            scale = rate / (rms / group["clip_threshold"]).clamp(min=1.0)
            for tile in part.tiles:
                weight = tile.of(part.tensor)
                if group["weight_decay"]:
                    weight.mul_(1 - group["weight_decay"] * rate)
                weight.sub_(tile.of(part.tensor.grad).mul_(scale))

    def _statistics(self, work: Sequence[Work]) -> list[tuple[Tensor, ...]]:
        """Returns sums of each parameter: of squared gradients by row [B, R] and column [B, C], and of squares []."""
        shapes = [
            shape for _, part in work for b, r, c in [part.shape] for shape in ((b, r), (b, c), ())
        ]
        sizes = [prod(shape) for shape in shapes]

        def views(buffer: Tensor) -> list[tuple[Tensor, ...]]:
            tensors = [
                piece.view(shape) for piece, shape in zip(buffer.split(sizes), shapes, strict=True)
            ]
            return list(zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True))

        buffer = work[0][1].tensor.new_zeros(sum(sizes))
        for (group, part), (rows, columns, weights) in zip(work, views(buffer), strict=True):
            for tile in part.tiles if part.counts else ():
                squares = tile.of(part.tensor.grad).square().add_(group["eps"][0])
                rows[tile.where[:2]] += squares.sum(-1)
                columns[tile.where[::2]] += squares.sum(-2)
            weights += part.squared_norm(part.tensor)
        return views(self._sum(buffer))

    def _precondition(
        self, group: Group, part: Part, rows: Tensor, columns: Tensor, weights: Tensor
    ) -> None:
        """Updates the statistics of a parameter, and divides its gradient by their root."""
        state, owner = self.state[part.owner], part.owner
        state["step"] = state.get("step", 0) + 1
        state["RMS"] = (weights / prod(part.shape)).sqrt()
        decay = 1.0 - state["step"] ** group["decay_rate"]
        shard: Shard | None = getattr(owner, "shard", None)
        whole = shard.shape if shard else owner.shape
        if len(whole) < 2:
            squares = rows.view(whole)
            squares = (
                shard.slice(squares, tp_rank(self._mesh), tp_size(self._mesh)) if shard else squares
            )
            factors = _average(state, "exp_avg_sq", squares, decay).rsqrt()
            for tile in part.tiles:
                tile.of(part.tensor.grad).mul_(tile.of(factors, -part.start))
            return
        row = _average(
            state, "exp_avg_sq_row", (rows / part.shape[2]).view(whole[:-1]), decay
        ).view_as(rows)
        column = _average(
            state, "exp_avg_sq_col", (columns / part.shape[1]).view(*whole[:-2], whole[-1]), decay
        )
        row, column = (row / row.mean(-1, keepdim=True)).rsqrt_(), column.view_as(columns).rsqrt()
        for tile in part.tiles:
            update = tile.of(part.tensor.grad)
            update.mul_(row[tile.where[:2]].unsqueeze(-1)).mul_(
                column[tile.where[::2]].unsqueeze(-2)
            )


def _average(state: dict[str, Any], name: str, value: Tensor, decay: float) -> Tensor:
    """Updates an exponential moving average. A state may have padding, if it was saved by the unsplit optimizer."""
    old = state[name].to(value) if name in state else torch.zeros_like(value)
    state[name] = old[tuple(map(slice, value.shape))].mul_(decay).add_(value, alpha=1.0 - decay)
    return state[name]


def _rate(group: Group, state: dict[str, Any]) -> Any:
    """Returns the learning rate of a parameter (section 9 of the paper, with the warm-up of its T5 users)."""
    rate = group["lr"]
    if group["relative_step"]:
        rate = min(1e-6 * state["step"] if group["warmup_init"] else 1e-2, state["step"] ** -0.5)
    return rate * state["RMS"].clamp(min=group["eps"][1]) if group["scale_parameter"] else rate


class Lamb(WholeMatrixOptimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2), with the norms of whole parameters in its trust ratios.

    It computes what pytorch_optimizer's class of the same name does on an unsplit parameter: the weight decay is
    decoupled, only the first moment's bias is corrected, and weight norms are cut at 10. It overwrites the gradients.
    """

    element_states = ("exp_avg", "exp_avg_sq")
    LARGEST_WEIGHT_NORM = 10.0

    def __init__(
        self,
        groups: Any,
        lr: float,
        betas: tuple[float, float],
        *,
        mesh: ParallelMesh | None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(
            groups, {"lr": lr, "betas": betas, "weight_decay": 0.0, "eps": eps, "step": 0}, mesh
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
        work = self._work()
        if not work:
            return
        for group, part in work:
            self._update_moments(group, part)
        own = [part.squared_norm(of) for _, part in work for of in (part.tensor, part.tensor.grad)]
        norms = self._sum(torch.stack(own)).sqrt().view(-1, 2)
        for (group, part), (weight, update) in zip(work, norms, strict=True):
            ratio = weight.clamp(max=self.LARGEST_WEIGHT_NORM) / (update + group["eps"])
            ratio = torch.where((weight != 0) & (update != 0), ratio, 1.0)
            scale = ratio * (group["lr"] / (1.0 - group["betas"][0] ** group["step"]))
            for tile in part.tiles:
                tile.of(part.tensor).sub_(tile.of(part.tensor.grad).mul_(scale))

    def _update_moments(self, group: Group, part: Part) -> None:
        """Decays a parameter's weights, updates its moments, and replaces its gradient by Adam's update."""
        state, (beta1, beta2) = self.state[part.tensor], group["betas"]
        for name in self.element_states:
            state.setdefault(name, torch.zeros_like(part.tensor))
        for tile in part.tiles:
            grad, mean, square = (
                tile.of(t) for t in (part.tensor.grad, state["exp_avg"], state["exp_avg_sq"])
            )
            mean.mul_(beta1).add_(grad, alpha=1.0 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            torch.div(mean, square.sqrt().add_(group["eps"]), out=grad)
            tile.of(part.tensor).mul_(1.0 - group["weight_decay"] * group["lr"])


def _matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns a parameter's shape as that of matrices [B, R, C]."""
    rows, columns = ((*shape, 1, 1)[:2]) if len(shape) < 2 else shape[-2:]
    return prod(shape[:-2]), rows, columns


def _tiles(
    shape: tuple[int, ...], shard: Shard | None, held: Range, start: int, mesh: ParallelMesh | None
) -> Iterator[Tile]:
    """Yields the tiles, without padding, of the elements [start, stop) of a rank's parameter that a tensor holds.

    Args:
        shape: That of the parameter on this rank.
        start: The place in the tensor of the parameter's first element.
    """
    lattice = _matrices(shape)
    strides = (lattice[1] * lattice[2], lattice[2], 1)
    axis, pieces = (
        0,
        [((0, lattice[0]), 0)],
    )  # (the range along an axis of this rank's parameter, that of the whole)
    if shard is not None:
        behind = len(shape) - 1 - shard.dim  # dimensions after the one that is split
        axis = max(2 - behind, 0) if len(shape) > 1 else 1
        width, local = prod(shape[shard.dim + 1 : -2]) if not axis else 1, 0
        pieces = []
        for first, last in shard.ranges(tp_rank(mesh), tp_size(mesh)):
            pieces.append(((local, local + (last - first) * width), first * width))
            local += (last - first) * width
    for box in _boxes(*held, lattice):
        for (first, last), place in pieces:
            low, high = max(first, box[axis][0]), min(last, box[axis][1])
            if low >= high:
                continue
            inside = [*box]
            inside[axis] = (low, high)
            offset = start + sum(
                bounds[0] * stride for bounds, stride in zip(inside, strides, strict=True)
            )
            where = [slice(*bounds) for bounds in inside]
            where[axis] = slice(low - first + place, high - first + place)
            yield Tile(offset, tuple(b - a for a, b in inside), strides, tuple(where))


def _boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[Range, ...]]:
    """Yields the boxes of which the elements [start, stop) of a contiguous tensor consist, in order."""
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    while start < stop:
        first, before = divmod(start, inner)
        if before or stop - start < inner:
            end = min(stop - first * inner, inner)
            yield from (((first, first + 1), *box) for box in _boxes(before, end, shape[1:]))
            start = first * inner + end
        else:
            last = stop // inner
            yield ((first, last), *((0, length) for length in shape[1:]))
            start = last * inner
