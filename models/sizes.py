"""Computes the sizes of a model's parameters, whole and split over tensor-parallel ranks, on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from ..mpu import Shard, VocabParallelEmbedding
from .auto import build_on_meta
from .common.config import ModelConfig

LARGEST_SIZE = 64  # tensor-parallel ranks


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
    return sizes_of(build_on_meta(config, None), tensor_parallel_size)


def sizes_of(model: nn.Module, tensor_parallel_size: int) -> list[ParameterSize]:
    """Returns the same as `parameter_sizes`, of an unsplit model that is built already; the meta device will do."""
    legal = legal_sizes(model)
    if tensor_parallel_size not in legal:
        raise ValueError(
            f"a {type(model).__name__} of this configuration cannot be split {tensor_parallel_size} ways; use a "
            f"tensor-parallel size of {', '.join(map(str, legal))}"
        )
    tables = {parameter for module in model.modules() if is_embedding(module) for parameter in module.parameters()}
    sizes: list[ParameterSize] = []
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "shard", None)
        shape = tuple(shard.shape if shard else parameter.shape)
        local = tuple(shard.local_shape(tensor_parallel_size)) if shard else shape
        sizes.append(ParameterSize(name, shape, local, parameter in tables))
    return sizes


def full_size(parameter: nn.Parameter) -> int:
    """Returns the number of elements of the unsplit parameter, without padding."""
    shard = getattr(parameter, "shard", None)
    return parameter.numel() if shard is None else prod(shard.shape)


def is_embedding(module: nn.Module) -> bool:
    """Returns whether a module is an embedding of tokens, positions or segments, which "embeddings" freezes."""
    return isinstance(module, (nn.Embedding, VocabParallelEmbedding))


def legal_sizes(model: nn.Module) -> tuple[int, ...]:
    """Returns the tensor-parallel sizes up to `LARGEST_SIZE` over which every parameter can be split."""
    shards: Sequence[Shard | None] = [getattr(parameter, "shard", None) for parameter in model.parameters()]
    sizes = set(range(1, LARGEST_SIZE + 1))
    for shard in {shard for shard in shards if shard is not None}:
        sizes &= set(shard.legal_sizes(LARGEST_SIZE))
    return tuple(sorted(sizes))
