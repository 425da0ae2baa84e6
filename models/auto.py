"""Finds configurations by name, and builds models from configurations."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..checkpoint.folder_files import CONFIG, refuse_adapter_folder, refuse_run_folder
from ..checkpoint.formats.megatron import SavedRun
from ..checkpoint.hub import find_config_folder
from ..checkpoint.stored_tensor import StoredTensor
from ..files.strict_json import read_folder_json
from ..mpu import ParallelMesh, initialize, materialize
from ..mpu.initialization import Receive
from .config import ModelConfig
from .family_table import architectures, family, find_family, list_families, presets
from .loading_options import LoadingOptions, change_config, note_attention, read_device, read_dtype
from .megatron import MegatronMap
from .nearest import refuse_architecture
from .parallel_config import ParallelConfig
from .pipeline import slice_pipeline_stage


def find_config(name: str) -> ModelConfig:
    """Returns the configuration of a preset, a folder with a `config.json`, or such a file.

    Of `org/name[@revision]`, a name on the Hub, `config.json` is downloaded. Raises ValueError if
    none fits.
    """
    for preset, config in presets():
        if preset == name:
            return config.with_changes()  # The caller may change it.
    values = read_config_values(name)
    try:
        return config_from_dict(values)
    except ValueError as error:
        file = Path(name, CONFIG) if Path(name).is_dir() else name
        raise ValueError(f"{file}: {error}") from None


def read_config_values(name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the contents of the `config.json` of a folder, a file, or a name on the Hub.

    Args:
        options: Options of the Hub's client.
    """
    path = Path(find_config_folder(name, options))
    if path.is_dir():
        values = read_folder_json(path, CONFIG)
    else:
        values = read_folder_json(path.parent, path.name)
    if values is None:
        refuse_run_folder(path)
        refuse_adapter_folder(path)
        known = [preset for preset, _ in presets()]
        close = difflib.get_close_matches(name, known, n=1)
        meant = f"presets: {', '.join(known)}"
        if close:
            meant = f"did you mean {close[0]}? `shardzoo models` lists all presets"
        raise ValueError(
            f"model {name!r} is neither a preset nor a folder with a {CONFIG}; {meant}"
        )
    return values


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
    """Returns the configuration of a family from the contents of a `config.json`."""
    facts = find_family(values)
    config = facts.config.from_dict(values)
    if config.architecture not in facts.architectures:
        # transformers ignores the name; the first files of Llama say LLaMAForCausalLM.
        spelled = {name.lower(): name for name in facts.architectures}
        known = spelled.get(str(config.architecture).lower())
        if known is not None:
            config = config.with_changes(architecture=known)
    model_class(config)
    return config


def infer_config(
    ranks: Sequence[Mapping[str, StoredTensor]], saved: SavedRun | None = None
) -> ModelConfig:
    """Infers the configuration of a model without a `config.json` from each rank's tensors, or
    raises ValueError.

    `saved` is what is known about the program that wrote them.
    """
    if saved is not None:
        return find_megatron_map(ranks[0], saved.arguments).infer_config(saved.arguments, ranks)
    reasons: list[str] = []
    for facts in list_families():
        if facts.infer_config is None:
            continue
        try:
            return facts.infer_config(ranks)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(f"there is no {CONFIG}, and {'; '.join(reasons)}; name one with --config")


def find_megatron_map(names: Iterable[str], arguments: Mapping[str, Any]) -> MegatronMap:
    """Returns the map of the family to which tensors of these names, in Megatron-LM's files of a
    run with these arguments, belong.
    """
    names = list(names)
    has_two_stacks = any("cross_attention" in name or "inter_attention" in name for name in names)
    if has_two_stacks and not any("relative_pos_emb" in name for name in names):
        raise ValueError(
            "it is Megatron-LM's T5 without relative positions (position_embedding_type is "
            "'learned_absolute' or 'rope'); no T5 of transformers has those"
        )
    for facts in list_families():
        found = facts.megatron
        if found is not None and found.owns(found.to_local_names(names), arguments):
            return found
    listed = ", ".join(sorted(names)[:5])
    raise ValueError(
        f"its tensors are of no family that Megatron-LM shares with the zoo: {listed}, …"
    )


def as_config(config: ModelConfig | dict[str, Any] | str | Any) -> ModelConfig:
    """Returns a family's configuration from itself, the contents of a `config.json`, a preset's
    name, a path, or a configuration object of transformers."""
    if isinstance(config, ModelConfig):
        return config
    if isinstance(config, (str, Path)):
        return find_config(str(config))
    if isinstance(config, dict):
        return config_from_dict(cast(dict[str, Any], config))
    if hasattr(config, "to_dict"):
        return config_from_dict(config.to_dict())
    raise ValueError(
        f"a model's configuration cannot be a {type(config).__name__}; pass a dict, a preset or a "
        "path"
    )


def model_class(config: ModelConfig) -> type[nn.Module]:
    """Returns the class that `config.architecture` names.

    Raises ValueError if the family does not have it.
    """
    known = family(config.model_type).architectures
    if config.architecture not in known:
        raise ValueError(
            refuse_architecture(config.architecture, config.model_type, architectures())
        )
    return known[config.architecture]


def build_on_meta(
    config: ModelConfig,
    mesh: ParallelMesh | None,
    parallel_config: ParallelConfig | None = None,
    architecture: type[nn.Module] | None = None,
) -> nn.Module:
    """Builds this rank's part of the model on the meta device: parameters have their `.shard` but
    no storage.

    Args:
        architecture: The class to build; by default that which the configuration names.
    """
    if architecture is None:
        architecture = model_class(config)
    with torch.device("meta"):
        return architecture(config, mesh=mesh, parallel_config=parallel_config or ParallelConfig())


@dataclass(frozen=True)
class _Described:
    """A configuration that a cache can look up: some have fields that have no hash."""

    text: str
    config: ModelConfig = field(compare=False)


def unsplit_on_meta(config: ModelConfig) -> nn.Module:
    """Returns the unsplit model on the meta device, which is built once for equal configurations:
    do not change it.
    """
    return _unsplit(_Described(repr(config), config))


@lru_cache(maxsize=2)
def _unsplit(described: _Described) -> nn.Module:
    return build_on_meta(described.config, None)


def whole_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Returns a model's parameters; of a pipeline stage, those of the other stages too, without
    storage.
    """
    own = dict(model.named_parameters())
    if getattr(model, "stage", None) is None:
        return own
    whole = dict(build_on_meta(model.config, model.mesh).named_parameters())
    return {name: own.get(name, parameter) for name, parameter in whole.items()}


def from_config(
    config: ModelConfig | dict[str, Any] | str | Any,
    mesh: ParallelMesh | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    seed: int = 1234,
    parallel_config: ParallelConfig | None = None,
    architecture: type[nn.Module] | None = None,
    torch_dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    **options: Any,
) -> nn.Module:
    """Builds a model with newly initialized weights; under a mesh, this rank's part of it.

    Args:
        config: A family's configuration, the contents of a `config.json`, the name of a preset, a
            path, or a configuration object of transformers.
        mesh: The mesh over whose tensor-parallel ranks the model is split.
        device: Where the parameters are. "meta" gives parameters with their `.shard` but without
            storage; `Trainer` with env_type="fsdp" initializes them when it has split them, so that
            no rank ever has the whole model.
        dtype: The type of the parameters; by default PyTorch's default type.
        torch_dtype: The older name of `dtype`.
        seed: Determines the weights together with the parameters' names, independently of the mesh.
        parallel_config: How the model runs.
        architecture: The class of the model; by default that which the configuration names.
        device_map: The device, as transformers takes it.
        options: Other arguments of transformers, and settings of the configuration.
    """
    taken = LoadingOptions.from_arguments(options)
    if taken.tensor_ranks is not None:
        raise ValueError(
            "from_config takes no tp_plan; pass mesh=ParallelMesh(tensor_parallel_size=…)"
        )
    read = as_config(config)
    if taken.changes:
        read = change_config(read, taken.changes, "from_config")
    place = read_device(device, device_map, mesh)
    model: Any = build_on_meta(read, mesh, parallel_config, architecture)
    note_attention(model.config, taken.attention)
    slice_pipeline_stage(model, mesh, parallel_config)
    if place.type != "meta":
        materialize(model, place, read_dtype(dtype, torch_dtype))
        initialize(model, model.initialize_parameter, seed, mesh)
        return model

    wanted = read_dtype(dtype, torch_dtype)
    if wanted is not None:
        model.to(wanted)
    # LoRA weights may come later, and have other initial values.
    own = {name for name, _ in model.named_parameters()}

    def fill(receive: Receive) -> None:
        initialize(model, model.initialize_parameter, seed, mesh, only=own, receive=receive)

    model.fill_parameters = fill
    return model
