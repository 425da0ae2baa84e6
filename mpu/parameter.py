"""Creates the parameters that are split over the ranks of a mesh, and the base of their layers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from .mesh import ParallelMesh, axis_ranks, axis_sizes
from .shard import Shard


class SplitLayer(nn.Module):
    """Base of the layers whose weight is split; `repr` shows the split."""

    shard: Shard
    sequence_parallel: bool
    mesh: ParallelMesh | None

    def extra_repr(self) -> str:
        return f"{self.shard.describe()}, sequence_parallel={self.sequence_parallel}"


class SplitParameter(nn.Parameter):
    """A parameter whose attributes survive `copy.deepcopy`.

    Attributes:
        shard: How the full parameter is split.
        model_parallel, tensor_model_parallel: The marks by which DeepSpeed counts a split parameter
            on every tensor-parallel rank.
        expert_parallel: Whether the ranks along the expert axis hold different parts, so that
            gradients are summed over the other data-parallel ranks only.
    """

    shard: Shard
    model_parallel: bool
    tensor_model_parallel: bool
    expert_parallel: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitParameter:
        copy = cast(SplitParameter, cast(Any, super()).__deepcopy__(memo))
        vars(copy).update(vars(self))
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the parameter with its attributes and its class."""
        return _rebuild, (type(self), self.data, self.requires_grad, dict(vars(self)))


def _rebuild(
    kind: type[SplitParameter],
    values: torch.Tensor,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> Any:
    """Returns an unpickled `SplitParameter`."""
    parameter = kind(values, requires_grad=requires_grad)
    vars(parameter).update(attributes)
    return parameter


def split_parameter(shard: Shard, mesh: ParallelMesh | None) -> SplitParameter:
    """Returns a parameter for this rank's part, filled with NaN until it is initialized or loaded."""
    shape = shard.local_shape(axis_ranks(mesh), axis_sizes(mesh))
    parameter = SplitParameter(torch.full(shape, float("nan")))
    is_tensor_parallel = any(split.axis == "tensor" for split in shard.splits)
    parameter.shard = shard
    parameter.model_parallel = is_tensor_parallel
    parameter.tensor_model_parallel = is_tensor_parallel
    parameter.expert_parallel = shard.splits_experts and axis_sizes(mesh)["expert"] > 1
    return parameter
