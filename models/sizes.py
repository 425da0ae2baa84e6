"""Computes the sizes of a model's parameters, whole and split over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, cast

from torch import nn

from ..mpu import Shard, VocabParallelEmbedding
from ..mpu.mesh import Axis
from ..mpu.parameter import SplitParameter
from .auto import unsplit_on_meta
from .blocks.relative_bias import RelativeBias
from .config import ModelConfig


@dataclass(frozen=True)
class ParameterSize:
    """The size of a parameter.

    Attributes:
        shape: That of the whole parameter, without padding.
        local_shape: That of the largest part that a rank holds, with padding.
        is_embedding: Whether the parameter belongs to an embedding.
        is_hidden_matrix: Whether it is a matrix of a hidden layer: see `find_hidden_matrices`.
        is_expert: Whether it has stacked experts, which the ranks along the expert axis share.
        padding: Elements of the largest part that belong to no row of the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    is_embedding: bool
    is_hidden_matrix: bool = False
    is_expert: bool = False
    padding: int = 0

    @property
    def full(self) -> int:
        return prod(self.shape)

    @property
    def local(self) -> int:
        return prod(self.local_shape)


def parameter_sizes(
    config: ModelConfig, tensor_parallel_size: int = 1, expert_parallel_size: int = 1
) -> list[ParameterSize]:
    """Returns the size of each parameter.

    Raises ValueError, naming the sizes that work, if the model cannot be split so.
    """
    return measure_parameters(unsplit_on_meta(config), tensor_parallel_size, expert_parallel_size)


def measure_parameters(
    model: nn.Module, tensor_parallel_size: int, expert_parallel_size: int = 1
) -> list[ParameterSize]:
    """Returns the size of each parameter of an unsplit model, which may be on the meta device.

    Raises ValueError, naming the sizes that work, if the model cannot be split so.
    """
    axes: dict[Axis, int] = {"tensor": tensor_parallel_size, "expert": expert_parallel_size}
    first: dict[Axis, int] = {"tensor": 0, "expert": 0}
    largest = largest_size(model)
    if not 1 <= tensor_parallel_size <= largest:
        raise ValueError(
            f"a {type(model).__name__} of this configuration cannot be split "
            f"{tensor_parallel_size} ways; use a tensor-parallel size from 1 to {largest}"
        )
    embeddings: set[nn.Parameter] = set()
    for module in model.modules():
        if is_embedding(module):
            embeddings.update(module.parameters())
    hidden = find_hidden_matrices(model)
    sizes: list[ParameterSize] = []
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "shard", None)
        padding = 0
        if shard is None:
            shape = tuple(parameter.shape)
            local_shape = shape
        else:
            shape = tuple(shard.shape)
            local_shape = tuple(shard.local_shape(first, axes))
            if any(split.pad_multiple for split in shard.splits):
                held = shard.without_padding().local_shape(first, axes)
                padding = prod(local_shape) - prod(held)
        sizes.append(
            ParameterSize(
                name,
                shape,
                local_shape,
                parameter in embeddings,
                parameter in hidden,
                shard is not None and shard.splits_experts,
                padding,
            )
        )
    return sizes


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a model of the zoo or of transformers: the items of its outermost lists
    of modules, in its order.
    """
    blocks: list[nn.Module] = []
    lists: list[str] = []
    named: dict[str, nn.Module] = dict(cast(Any, model).named_modules())
    for name, module in named.items():
        if any(name.startswith(f"{outer}.") for outer in lists):
            continue
        if isinstance(module, nn.ModuleList):
            lists.append(name)
            blocks += [item for item in module if next(item.parameters(), None) is not None]
    return list(dict.fromkeys(blocks))


def find_hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Returns the weights of hidden layers that are matrices, or several stacked ones: what is in
    the blocks, but for biases, norms, embeddings and relative biases.
    """
    hidden: set[nn.Parameter] = set()
    for block in find_blocks(model):
        for module in block.modules():
            if is_embedding(module) or isinstance(module, RelativeBias):
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.dim() >= 2:
                    hidden.add(parameter)
    return hidden


def full_size(parameter: nn.Parameter) -> int:
    """Returns the number of elements of the unsplit parameter, without padding."""
    shard = getattr(parameter, "shard", None)
    return parameter.numel() if shard is None else prod(shard.shape)


def is_embedding(module: nn.Module) -> bool:
    """Returns whether a module is an embedding of tokens, positions or segments."""
    return isinstance(module, (nn.Embedding, VocabParallelEmbedding))


def largest_size(model: nn.Module) -> int:
    """Returns the largest number of tensor-parallel ranks.

    Each rank must hold at least one unit, such as a head, of every parameter.
    """
    sizes = [shard.largest_size for shard in _list_shards(model)]
    return min(size for size in sizes if size is not None)


def compute_uneven_work(model: nn.Module, tensor_parallel_size: int) -> float:
    """Returns how much more the busiest rank multiplies than an even share, such as 0.04.

    It is the price of heads that do not divide, of key-value heads that several ranks compute, and
    of padding.
    """
    shards = _list_shards(model)
    busiest = sum(prod(shard.compute_shape(0, tensor_parallel_size)) for shard in shards)
    total = sum(prod(shard.shape) for shard in shards)
    return tensor_parallel_size * busiest / total - 1


def _list_shards(model: nn.Module) -> list[Shard]:
    """Returns the splits of the parameters that tensor-parallel ranks split."""
    shards: list[Shard] = []
    for parameter in model.parameters():
        if not isinstance(parameter, SplitParameter):
            continue
        if any(split.axis == "tensor" for split in parameter.shard.splits):
            shards.append(parameter.shard)
    return shards
