"""A model's parameters and how they are split, from its configuration: the model is built without storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.overrides import TorchFunctionMode

from ..models.auto import config_from_dict, family, from_config
from ..models.common.config import ModelConfig
from ..models.common.name_map import NameMap
from ..mpu import Shard


@dataclass(frozen=True)
class Parameter:
    """shape: full and unpadded. shard: None for a replicated parameter."""

    name: str
    shape: tuple[int, ...]
    shard: Shard | None

    @property
    def dim(self) -> int:
        return self.shard.dim if self.shard else 0

    def ranges(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """What `rank` of `size` holds along `dim`; all of it where the parameter is replicated."""
        return tuple(self.shard.ranges(rank, size)) if self.shard else ((0, (self.shape or (1,))[0]),)

    def local_shape(self, size: int) -> tuple[int, ...]:
        """ValueError, naming the parameter and the sizes that work, if it cannot be split `size` ways."""
        try:
            return self.shard.local_shape(size) if self.shard else self.shape
        except ValueError as error:
            raise ValueError(f"parameter {self.name}: {error}") from None

    def without_padding(self) -> Parameter:
        """As formats store it that know no padded vocabulary."""
        return replace(self, shard=replace(self.shard, pad_multiple=0)) if self.shard else self


@dataclass(frozen=True)
class NativeModel:
    config: ModelConfig
    name_map: NameMap
    parameters: Mapping[str, Parameter]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def padded_vocab_size(self, size: int) -> int:
        """Rows of the vocabulary over all of `size` ranks."""
        for parameter in self.parameters.values():
            if parameter.shard is not None and parameter.shard.pad_multiple:
                return size * parameter.local_shape(size)[parameter.dim]
        return self.vocab_size

    def check_size(self, size: int) -> None:
        """ValueError if some parameter cannot be split `size` ways."""
        if size < 1:
            raise ValueError(f"a tensor-parallel size of {size} is none; use 1 or more")
        for parameter in self.parameters.values():
            parameter.local_shape(size)


def native_model(
    values: Mapping[str, Any], *, most_layers: int, is_tied: Callable[[ModelConfig, NameMap], bool | None]
) -> NativeModel:
    """The parameters of the model that the contents of a `config.json` describe.

    most_layers: more than the checkpoint can hold; a config that claims more is refused before it is built.
    is_tied: whether the checkpoint's output head is the embedding, which files know better than `config.json`
        (see `models.t5.config`); None leaves it to the config.
    """
    try:
        config = config_from_dict(dict(values))
        layers = _number_of_layers(config)
        if not 0 < layers <= most_layers:
            raise ValueError(f"it claims {layers:,} layers, but there are {most_layers:,} tensors in all")
        name_map = family(config.model_type).NAME_MAP
        tied = is_tied(config, name_map)
        if tied is not None:
            config = config.with_changes(tie_word_embeddings=tied)
        with _NoInitialValues():
            model = from_config(config, device="meta")
    except (TypeError, AttributeError, KeyError, OverflowError, ArithmeticError, RuntimeError, ValueError) as error:
        # Whatever a wrong value in config.json leads to while the model is built is the file's mistake.
        raise ValueError(f"config.json: {error}") from None
    parameters = {}
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "shard", None)
        shape = tuple(shard.shape if shard else parameter.shape)
        parameters[name] = Parameter(name, shape, shard)
    return NativeModel(config, name_map, parameters)


def _number_of_layers(config: ModelConfig) -> int:
    return getattr(config, config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))


class _NoInitialValues(TorchFunctionMode):
    """Parameters without storage have no values to draw, and drawing them imports half of torch's compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return function(*args, **(kwargs or {}))
