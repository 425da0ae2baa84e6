"""Configurations and models by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..mpu import ParallelMesh, initialize, materialize
from .common.config import ModelConfig
from .common.parallel_config import ParallelConfig
from .registry import family, presets


def find_config(name: str) -> ModelConfig:
    """The configuration of a preset, or of a folder with a `config.json`, or of such a file."""
    for preset, config in presets():
        if preset == name:
            return config
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(preset for preset, _ in presets())
        raise ValueError(f"model {name!r} is no preset and no folder with a config.json; presets: {known}")
    return config_from_dict(read_config(path))


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a `config.json`. ValueError if it is none."""
    try:
        values = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a readable config.json: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(values).__name__}")
    return values


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
    if "model_type" not in values:
        raise ValueError("the configuration has no model_type, so its family is unknown")
    return family(values["model_type"]).config.from_dict(values)


def as_config(config: ModelConfig | dict[str, Any] | str | Any) -> ModelConfig:
    """A family's configuration from itself, from the contents of a `config.json`, from a preset's name or a path, or
    from transformers' configuration object."""
    if isinstance(config, ModelConfig):
        return config
    if isinstance(config, (str, Path)):
        return find_config(str(config))
    if isinstance(config, dict):
        return config_from_dict(config)
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
