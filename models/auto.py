"""Configurations and models by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..checkpoint.folder_files import CONFIG
from ..checkpoint.stored_tensor import StoredTensor
from ..data.files import read_folder_json
from ..mpu import ParallelMesh, initialize, materialize
from .common.config import ModelConfig
from .common.parallel_config import ParallelConfig
from .registry import FAMILIES, family, family_of, presets


def find_config(name: str) -> ModelConfig:
    """The configuration of a preset, or of a folder with a `config.json`, or of such a file."""
    for preset, config in presets():
        if preset == name:
            return config
    path = Path(name)
    folder, file = (path, CONFIG) if path.is_dir() else (path.parent, path.name)
    values = read_folder_json(folder, file)
    if values is None:
        known = ", ".join(preset for preset, _ in presets())
        raise ValueError(f"model {name!r} is no preset and no folder with a {CONFIG}; presets: {known}")
    return config_from_dict(values)


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
    return family_of(values).config.from_dict(values)


def infer_config(ranks: Sequence[Mapping[str, StoredTensor]]) -> ModelConfig:
    """What each rank's tensors tell of a model without a `config.json`. ValueError if that is not enough."""
    reasons: list[str] = []
    for infer in filter(None, (family(name).infer_config for name in FAMILIES)):
        try:
            return infer(ranks)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(f"there is no {CONFIG}, and {'; '.join(reasons)}; name one with --config")


def as_config(config: ModelConfig | dict[str, Any] | str | Any) -> ModelConfig:
    """A family's configuration from itself, from the contents of a `config.json`, from a preset's name or a path, or
    from transformers' configuration object."""
    if isinstance(config, ModelConfig):
        return config
    if isinstance(config, (str, Path)):
        return find_config(str(config))
    if isinstance(config, dict):
        return config_from_dict(cast(dict[str, Any], config))
    if hasattr(config, "to_dict"):
        return config_from_dict(config.to_dict())
    raise ValueError(f"a model's configuration cannot be a {type(config).__name__}; pass a dict, a preset or a path")


def model_class(config: ModelConfig) -> type[nn.Module]:
    """The class that `config.architecture` names."""
    return family(config.model_type).architectures[config.architecture]


def build_on_meta(
    config: ModelConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig | None = None
) -> nn.Module:
    """This rank's part of the model as shapes alone: each parameter has its `.shard`, none has storage."""
    with torch.device("meta"):
        return model_class(config)(config, mesh=mesh, parallel_config=parallel_config or ParallelConfig())


def from_config(
    config: ModelConfig | dict[str, Any] | str | Any,
    mesh: ParallelMesh | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 1234,
    parallel_config: ParallelConfig | None = None,
) -> nn.Module:
    """A new model with freshly drawn weights, this rank's part of it under a mesh.

    config: a family's configuration, the contents of a `config.json`, a preset's name, or transformers' object.
    device: "meta" gives the whole layout (each parameter's `.shard`) and no storage.
    seed: with the parameters' names it decides the weights, whatever the mesh.
    """
    model: Any = build_on_meta(as_config(config), mesh, parallel_config)
    if torch.device(device).type != "meta":
        materialize(model, device, dtype)
        initialize(model, model.init_weights, seed, mesh)
    return model
