"""Computes the sizes of a model's parameters, whole and split over tensor-parallel ranks, on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import nn

from ..mpu import Shard, VocabParallelEmbedding
from ..mpu.parameter import SplitParameter
from .auto import unsplit_on_meta
from .config import ModelConfig


@dataclass(frozen=True)
class ParameterSize:
    """The size of a parameter."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter, without padding
    local_shape: tuple[int, ...]  # of the largest part that a rank holds, with padding
    is_embedding: bool

    @property
    def full(self) -> int:
        return prod(self.shape)

    @property
    def local(self) -> int:
        return prod(self.local_shape)


def parameter_sizes(config: ModelConfig, tensor_parallel_size: int = 1) -> list[ParameterSize]:
    """Returns the size of each parameter. ValueError, naming the sizes that work, if the model cannot be split so."""
    return sizes_of(unsplit_on_meta(config), tensor_parallel_size)


def sizes_of(model: nn.Module, tensor_parallel_size: int) -> list[ParameterSize]:
    """Returns the same as `parameter_sizes`, of an unsplit model that is built already; the meta device will do."""
    largest = largest_size(model)
    if not 1 <= tensor_parallel_size <= largest:
        raise ValueError(
            f"a {type(model).__name__} of this configuration cannot be split {tensor_parallel_size} ways; use a "
            f"tensor-parallel size from 1 to {largest}"
        )
    tables = {
        parameter
        for module in model.modules()
        if is_embedding(module)
        for parameter in module.parameters()
    }
    sizes: list[ParameterSize] = []
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "shard", None)
        shape = tuple(shard.shape if shard else parameter.shape)
        local = tuple(shard.local_shape(0, tensor_parallel_size)) if shard else shape
        sizes.append(ParameterSize(name, shape, local, parameter in tables))
    return sizes


def full_size(parameter: nn.Parameter) -> int:
    """Returns the number of elements of the unsplit parameter, without padding."""
    shard = getattr(parameter, "shard", None)
    return parameter.numel() if shard is None else prod(shard.shape)


def is_embedding(module: nn.Module) -> bool:
    """Returns whether a module is an embedding of tokens, positions or segments, which "embeddings" freezes."""
    return isinstance(module, (nn.Embedding, VocabParallelEmbedding))


def largest_size(model: nn.Module) -> int:
    """Returns the largest number of tensor-parallel ranks: a rank holds at least one unit of every parameter."""
    return min(largest for shard in _shards(model) if (largest := shard.largest_size) is not None)


def uneven_work(model: nn.Module, tensor_parallel_size: int) -> float:
    """Returns how much more the busiest rank multiplies than an even share of the split parameters, e.g. 0.04.

    It is the price of heads that do not divide, of key-value heads that several ranks compute, and of padding.
    """
    shards = _shards(model)
    busiest = sum(prod(shard.compute_shape(0, tensor_parallel_size)) for shard in shards)
    return tensor_parallel_size * busiest / sum(prod(shard.shape) for shard in shards) - 1


def _shards(model: nn.Module) -> list[Shard]:
    return [
        parameter.shard for parameter in model.parameters() if isinstance(parameter, SplitParameter)
    ]
