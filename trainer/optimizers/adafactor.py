"""Adafactor for parameters that tensor parallelism or ZeRO splits, or that are padded."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...mpu import ParallelMesh, Shard, tp_rank, tp_size
from .whole_matrix import ParameterGroup, ParameterPart, WholeMatrixOptimizer


class Adafactor(WholeMatrixOptimizer):
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 and 5), without a first
    moment.

    It computes what transformers' class of the same name does on an unsplit parameter, and keeps
    the same states: the means over columns and rows of the squared gradients, of whole matrices and
    the same on all ranks; and the squared gradients of vectors, split like the vectors. It
    overwrites the gradients.

    Args:
        lr: The learning rate; unused with `relative_step`.
        relative_step: Whether the rate follows from the step (section 9 of the paper).
        scale_parameter: Whether the rate is multiplied by the root mean square of each parameter.
        eps: Added to squared gradients; the least root mean square of a parameter.
        clip_threshold: The largest root mean square of an update.
        decay_rate: The exponent of the step in the decay of the statistics.
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
            "weight_decay": 0.0,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": relative_step,
        }
        super().__init__(groups, defaults, mesh)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        work = self.collect_parts()
        if not work:
            return
        # First collective: sums of squares of rows, columns and weights. Each gradient becomes its
        # update.
        for (group, part), sums in zip(work, self._sum_statistics(work), strict=True):
            self._precondition(group, part, *sums)
        # Second collective: norms of the updates, which are clipped by their root mean square.
        own_norms = [part.squared_norm(part.tensor.grad) for _, part in work]
        norms = self.sum_over_parts(torch.stack(own_norms))
        for (group, part), squares in zip(work, norms, strict=True):
            rate = find_rate(group, self.state[part.owner])
            rms = (squares / prod(part.shape)).sqrt()
            scale = rate / (rms / group["clip_threshold"]).clamp(min=1.0)
            for tile in part.tiles:
                weight = tile.view_in(part.tensor)
                if group["weight_decay"]:
                    weight.mul_(1 - group["weight_decay"] * rate)
                weight.sub_(tile.view_in(part.tensor.grad).mul_(scale))

    def _sum_statistics(
        self, work: Sequence[tuple[ParameterGroup, ParameterPart]]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns sums of each whole parameter: of squared gradients by row [B, R] and column [B,
        C], of weights [].
        """
        shapes: list[tuple[int, ...]] = []
        for _, part in work:
            matrices, rows, columns = part.shape
            shapes += [(matrices, rows), (matrices, columns), ()]
        sizes = [prod(shape) for shape in shapes]

        def views(buffer: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
            pieces = zip(buffer.split(sizes), shapes, strict=True)
            tensors = [piece.view(shape) for piece, shape in pieces]
            return list(zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True))

        buffer = work[0][1].tensor.new_zeros(sum(sizes))
        for (group, part), (rows, columns, weights) in zip(work, views(buffer), strict=True):
            for tile in part.tiles if part.counts else ():
                squares = tile.view_in(part.tensor.grad).square().add_(group["eps"][0])
                rows[tile.rows] += squares.sum(-1)
                columns[tile.columns] += squares.sum(-2)
            weights += part.squared_norm(part.tensor)
        return views(self.sum_over_parts(buffer))

    def _precondition(
        self,
        group: ParameterGroup,
        part: ParameterPart,
        rows: Tensor,
        columns: Tensor,
        weights: Tensor,
    ) -> None:
        """Updates the statistics of a parameter, and divides its gradient by their root."""
        owner = part.owner
        state = self.state[owner]
        state["step"] = state.get("step", 0) + 1
        state["RMS"] = (weights / prod(part.shape)).sqrt()
        decay = 1.0 - state["step"] ** group["decay_rate"]
        shard: Shard | None = getattr(owner, "shard", None)
        whole = shard.shape if shard else owner.shape
        if len(whole) < 2:
            squares = rows.view(whole)
            if shard:
                squares = shard.slice(squares, tp_rank(self._mesh), tp_size(self._mesh))
            factors = update_average(state, "exp_avg_sq", squares, decay).rsqrt()
            for tile in part.tiles:
                tile.view_in(part.tensor.grad).mul_(tile.view_in(factors, -part.start))
            return
        # The squared gradient of an element is about (mean of its row) * (mean of its column) /
        # (mean of all).
        _, row_count, column_count = part.shape
        row_means = (rows / column_count).view(whole[:-1])
        column_means = (columns / row_count).view(*whole[:-2], whole[-1])
        row = update_average(state, "exp_avg_sq_row", row_means, decay).view_as(rows)
        column = update_average(state, "exp_avg_sq_col", column_means, decay)
        row = (row / row.mean(-1, keepdim=True)).rsqrt_()  # [B, R]
        column = column.view_as(columns).rsqrt()  # [B, C]
        for tile in part.tiles:
            update = tile.view_in(part.tensor.grad)
            update.mul_(row[tile.rows].unsqueeze(-1))
            update.mul_(column[tile.columns].unsqueeze(-2))


def update_average(state: dict[str, Any], name: str, value: Tensor, decay: float) -> Tensor:
    """Updates an exponential moving average in an optimizer's state, and returns it."""
    old = state[name].to(value) if name in state else torch.zeros_like(value)
    # The state has padding if the unsplit optimizer has saved it.
    without_padding = old[tuple(slice(length) for length in value.shape)]
    state[name] = without_padding.mul_(decay).add_(value, alpha=1.0 - decay)
    return state[name]


def find_rate(group: ParameterGroup, state: dict[str, Any]) -> Any:
    """Returns the learning rate of a parameter (section 9 of the paper, with the warm-up of its T5
    users).
    """
    rate = group["lr"]
    if group["relative_step"]:
        largest = 1e-6 * state["step"] if group["warmup_init"] else 1e-2
        rate = min(largest, state["step"] ** -0.5)
    if group["scale_parameter"]:
        return rate * state["RMS"].clamp(min=group["eps"][1])
    return rate
