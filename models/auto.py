"""Finds a family by its name and builds its models."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..mpu import ParallelMesh, initialize, materialize
from .common.config import ModelConfig
from .common.execution import Execution

FAMILIES = ("gpt2",)


def family(model_type: str) -> ModuleType:
    """The family's package, which has `Config`, `Model`, `NAME_MAP` and `PRESETS`.

    A family with several heads also has `MODELS`: the architecture's name, as in `config.architecture` -> its class.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"there is no model family {model_type!r}; use one of {', '.join(FAMILIES)}")
    return importlib.import_module(f".{model_type}", __package__)


def find_config(name: str) -> ModelConfig:
    """The configuration of a preset, or of a folder with a `config.json`, or of such a file."""
    presets = {preset: config for model_type in FAMILIES for preset, config in family(model_type).PRESETS.items()}
    if name in presets:
        return presets[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model {name!r} is no preset and no folder with a config.json; presets: {', '.join(presets)}")
    return config_from_dict(json.loads(path.read_text()))


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
    if "model_type" not in values:
        raise ValueError("the configuration has no model_type, so its family is unknown")
    return family(values["model_type"]).Config.from_dict(values)


def model_class(config: ModelConfig) -> type[nn.Module]:
    """The class that `config.architecture` names."""
    package = family(config.model_type)
    return getattr(package, "MODELS", {}).get(config.architecture, package.Model)


def from_config(
    config: ModelConfig | dict[str, Any] | str,
    mesh: ParallelMesh | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 1234,
    execution: Execution | None = None,
) -> nn.Module:
    """A new model with freshly drawn weights, this rank's part of it under a mesh.

    config: a family's configuration, the contents of a `config.json`, or a preset's name.
    device: "meta" gives the whole layout (each parameter's `.shard`) and no storage.
    seed: with the parameters' names it decides the weights, whatever the mesh.
    """
    if isinstance(config, str):
        config = find_config(config)
    elif isinstance(config, dict):
        config = config_from_dict(config)
    with torch.device("meta"):
        model = model_class(config)(config, mesh=mesh, execution=execution or Execution())
    if torch.device(device).type != "meta":
        materialize(model, device, dtype)
        initialize(model, model.initial_value, seed, mesh)
    return model
