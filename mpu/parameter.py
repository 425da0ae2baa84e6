"""Creates the parameters that are split over the ranks of a mesh, and the base of their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import Self

from .mesh import ParallelMesh, axis_ranks, axis_sizes
from .shard import Shard


class SplitLayer(nn.Module):
    """Base of the layers whose weight is split; `repr` shows the split."""

    shard: Shard
    sequence_parallel: bool
    mesh: ParallelMesh | None

    def extra_repr(self) -> str:
        return f"{self.shard.describe()}, sequence_parallel={self.sequence_parallel}"


class MarkedParameter(nn.Parameter):
    """A parameter whose attributes survive `copy.deepcopy` and pickling."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = cast(Self, cast(Any, super()).__deepcopy__(memo))
        vars(copy).update(vars(self))
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the parameter with its attributes and its class."""
        return _rebuild, (type(self), self.data, self.requires_grad, dict(vars(self)))


class SplitParameter(MarkedParameter):
    """A parameter that the ranks of a mesh share.

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


class Fp32Parameter(MarkedParameter):
    """A replicated parameter that stays in fp32 whatever the type of its model, in memory and in
    files. It has no gradient.

    Its module is a `Fp32Parameters`.

    Attributes:
        keeps_fp32: True; what replaces the parameter takes over its attributes.
    """

    keeps_fp32: bool


def _rebuild(
    kind: type[MarkedParameter],
    values: torch.Tensor,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> Any:
    """Returns an unpickled `MarkedParameter`."""
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


def fp32_parameter(values: torch.Tensor) -> Fp32Parameter:
    """Returns an `Fp32Parameter` with these values."""
    parameter = Fp32Parameter(values.float(), requires_grad=False)
    parameter.keeps_fp32 = True
    return parameter


class Fp32Parameters(nn.Module):
    """Base of modules with an `Fp32Parameter`, which other types do not round."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Applies what `to`, `bfloat16` and the like do to the parameters."""
        kept: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters(recurse=False):
            if getattr(parameter, "keeps_fp32", False):
                kept[name] = parameter.data
        applied = cast(Self, cast(Any, super())._apply(fn, recurse))
        for name, values in kept.items():
            parameter = self.get_parameter(name)
            if parameter.dtype != values.dtype:
                parameter.data = values.to(parameter.device)
        return applied
