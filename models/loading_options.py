"""Reads the keyword arguments that transformers' `from_pretrained` and `from_config` take.

Each is taken with transformers' meaning, or refused with the reason.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch

from ..mpu import ParallelMesh
from .config import CALL_SETTINGS, ModelConfig, shown

# Arguments that change nothing here: models are always loaded so, and no code of a repository runs.
WITHOUT_EFFECT = frozenset(
    {
        "adapter_kwargs",
        "code_revision",
        "low_cpu_mem_usage",
        "mirror",
        "resume_download",
        "trust_remote_code",
        "use_flash_attention_2",
        "_commit_hash",
        "_fast_init",
        "_from_auto",
        "_from_pipeline",
    }
)
# Arguments that are refused unless they are None, False or empty, and why.
REFUSED = {
    "device_mesh": "pass mesh=, a ParallelMesh",
    "experts_implementation": "the zoo's families have no experts",
    "from_flax": "a Flax file has to be converted by transformers first",
    "from_tf": "a TensorFlow file has to be converted by transformers first",
    "fusion_config": "the zoo's models are built with fused projections",
    "gguf_file": "GGUF files are not supported; use the model's safetensors",
    "key_mapping": "each family has one map of names, models/<family>/hf.py",
    "load_in_4bit": "base_precision='nf4' packs a frozen model",
    "load_in_8bit": "base_precision='int8' packs a frozen model",
    "max_memory": "each rank holds its part on one device; split the model with mesh= instead",
    "offload_buffers": "each rank holds its part on one device; split the model with mesh= instead",
    "offload_folder": "each rank holds its part on one device; split the model with mesh= instead",
    "offload_state_dict": "a rank reads only its own part, so there is nothing to offload",
    "proxies": "the Hub's client takes them from the environment: HTTPS_PROXY",
    "quantization_config": "quantized models are not supported",
    "use_kernels": "SHARDZOO_KERNELS chooses the kernels",
    "variant": "name the folder with the files of the variant",
}
# They say how attention is computed and not what; the zoo chooses the kernel.
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# Arguments of loading, of which a message says that a wrong name may mean them.
LOADING = (
    "adapter",
    "attn_implementation",
    "base_precision",
    "config",
    "device",
    "device_map",
    "ignore_mismatched_sizes",
    "mesh",
    "output_loading_info",
    "parallel_config",
    "revision",
    "state_dict",
    "subfolder",
    "torch_dtype",
    "use_safetensors",
)
# Keyword argument -> that of the Hub's client.
HUB = {
    "cache_dir": "cache_dir",
    "force_download": "force_download",
    "local_files_only": "local_files_only",
    "token": "token",
    "use_auth_token": "token",
}


class LoadingError(ValueError, RuntimeError):
    """A mistake in a call for which transformers raises a `RuntimeError`."""


@dataclass(frozen=True)
class LoadingOptions:
    """The keyword arguments of one call.

    Attributes:
        hub: Options of the Hub's client.
        revision: The branch, tag or commit on the Hub.
        subfolder: The folder inside the named one that holds the model.
        changes: Settings of the configuration.
        use_safetensors: Whether only, or no, safetensors may be read; None for any.
        ignore_mismatched_sizes: Initialize parameters whose stored tensor has another shape.
        output_loading_info: Return what was missing, too.
        state_dict: The tensors to load instead of the folder's.
        attention: The name of an implementation of attention, which the configuration notes.
        tensor_ranks: The number of tensor-parallel ranks that transformers' arguments ask for, 0
            for all processes; None if they ask for no split.
    """

    hub: Mapping[str, Any] = field(default_factory=dict[str, Any])
    revision: str | None = None
    subfolder: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    use_safetensors: bool | None = None
    ignore_mismatched_sizes: bool = False
    output_loading_info: bool = False
    state_dict: Any = None
    attention: str | None = None
    tensor_ranks: int | None = None

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> LoadingOptions:
        """Reads keyword arguments. What is no argument of loading is a setting of the configuration.

        Raises:
            ValueError: An argument is refused.
        """
        own = {known.name for known in fields(cls)}
        own -= {"hub", "changes", "attention", "tensor_ranks"}
        found: dict[str, Any] = {}
        hub: dict[str, Any] = {}
        changes: dict[str, Any] = {}
        splitting: dict[str, Any] = {}
        attention: str | None = None
        for name, value in arguments.items():
            if name in own:
                found[name] = value
            elif name in HUB:
                if value not in (None, False):
                    hub[HUB[name]] = value
            elif name == "attn_implementation":
                check_attention(value)
                attention = value
            elif name in ("tp_plan", "tp_size", "distributed_config"):
                splitting[name] = value
            elif name == "weights_only":
                if value is False:
                    raise ValueError("weights_only must be True: no pickle is ever run")
            elif name in REFUSED:
                if value not in (None, False, {}, ""):
                    raise ValueError(f"{name}={shown(value)} is not supported: {REFUSED[name]}")
            elif name not in WITHOUT_EFFECT:
                changes[name] = value
        found["subfolder"] = found.get("subfolder") or ""
        return cls(
            hub=hub,
            changes=changes,
            attention=attention,
            tensor_ranks=read_tensor_ranks(**splitting),
            **found,
        )


def read_tensor_ranks(
    tp_plan: Any = None, tp_size: Any = None, distributed_config: Any = None
) -> int | None:
    """Returns over how many tensor-parallel ranks transformers' arguments split a model.

    Args:
        tp_plan: "auto" splits it over all processes.
        tp_size: The number of ranks.
        distributed_config: transformers' `DistributedConfig`, or a dict of its fields, instead.

    Returns:
        The number, 0 for all processes, or None if no argument asks for a split.

    Raises:
        ValueError: They ask for a plan of their own, or for another axis.
    """
    if distributed_config is not None:
        values: dict[str, Any] = {}
        if isinstance(distributed_config, Mapping):
            values.update(cast(Mapping[str, Any], distributed_config))
        else:
            values.update(vars(cast(object, distributed_config)))
        tp_plan = values.pop("tp_plan", tp_plan)
        tp_size = values.pop("tp_size", tp_size)
        for name, value in values.items():
            is_size = name.endswith("_size") and value not in (None, 1)
            is_choice = name.startswith("enable_") and value
            if is_size or is_choice:
                raise ValueError(
                    f"distributed_config has {name}={shown(value)}, but from_pretrained splits over "
                    "tensor-parallel ranks alone; see mesh=, a ParallelMesh, and the Trainer's "
                    "env_type='fsdp'"
                )
    if tp_plan not in (None, "auto"):
        raise ValueError(
            f"tp_plan={shown(tp_plan)} is not supported: each parameter declares how it is split; "
            "pass tp_plan='auto'"
        )
    if tp_size is None and tp_plan is None:
        return None
    if tp_size is None:
        return 0
    if type(tp_size) is not int or tp_size < 1:
        raise ValueError(f"tp_size must be a positive integer, not {shown(tp_size)}")
    return tp_size


def check_default_device() -> None:
    """Raises LoadingError within `with torch.device("meta")`, where nothing can be loaded."""
    if torch.get_default_device().type == "meta":
        raise LoadingError(
            "You are using `from_pretrained` with a meta device context manager or "
            "torch.set_default_device('meta'): parameters that are read need memory. Load the model "
            "outside; from_config(config, device='meta') builds one without memory"
        )


def check_attention(implementation: Any) -> None:
    """Raises ValueError for an `attn_implementation` that transformers does not have."""
    if implementation is not None and implementation not in ATTENTION:
        raise ValueError(
            f'Specified `attn_implementation="{implementation}"` is not supported: it must be one of '
            f"{', '.join(ATTENTION)}, which compute the same, and the zoo chooses the kernel"
        )


def note_attention(config: ModelConfig, implementation: str | None) -> None:
    """Sets the name of an implementation of attention, where transformers' configuration has it."""
    if implementation is not None:
        vars(config)["_attn_implementation"] = implementation


def read_dtype(dtype: Any, other: Any = None) -> torch.dtype | None:
    """Returns the type of the parameters; None for the stored one.

    Args:
        dtype: A type, its name ("bfloat16", "torch.bfloat16"), "auto" or None.
        other: The value of `torch_dtype`, the older name of the argument.

    Raises:
        ValueError: It is no floating-point type, or both are given and differ.
    """
    if dtype is not None and other is not None and dtype != other:
        raise ValueError(f"dtype={dtype} and torch_dtype={other} differ; give one of them")
    wanted = other if dtype is None else dtype
    if wanted is None or wanted == "auto":
        return None
    found = wanted
    if isinstance(wanted, str):
        found = getattr(torch, wanted.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"dtype must be a floating-point type such as torch.bfloat16, its name, or 'auto', not "
            f"{shown(wanted)}"
        )
    return found


def read_device(
    device: torch.device | str | int, device_map: Any, mesh: ParallelMesh | None
) -> torch.device:
    """Returns the device of the parameters.

    Args:
        device_map: As in transformers, if it means one device: a device, its number, "auto" (the
            rank's own), or a map of the whole model to a device.

    Raises:
        ValueError: It would put the model on several devices.
    """
    if isinstance(device_map, Mapping):
        devices = {str(value) for value in cast(Mapping[str, Any], device_map).values()}
        if len(devices) != 1:
            raise ValueError(
                f"device_map puts the model on {len(devices)} devices; a rank holds its part on "
                "one device: split the model over ranks with mesh="
            )
        device_map = next(iter(cast(Mapping[str, Any], device_map).values()))
    if device_map is None:
        return torch.device(device)
    if device_map in ("balanced", "balanced_low_0", "sequential"):
        raise ValueError(
            f"device_map={device_map!r} puts the model on several devices; use 'auto', the rank's "
            "own device, and split the model over ranks with mesh="
        )
    if device_map == "auto":
        has_gpu = torch.cuda.is_available() if mesh is None else mesh.device_type == "cuda"
        if not has_gpu:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
    if isinstance(device_map, int) or (isinstance(device_map, str) and device_map.isdecimal()):
        return torch.device("cuda", int(device_map))
    try:
        return torch.device(device_map)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device_map must be a device, 'auto', or a map of the whole model to a device, not "
            f"{shown(device_map)}"
        ) from None


def name_source(path: str | os.PathLike[str], options: LoadingOptions) -> str:
    """Returns the path, or the name on the Hub with its revision."""
    name = os.fspath(path)
    if options.revision is None or os.path.isdir(name) or "@" in name:
        return name
    return f"{name}@{options.revision}"


def change_config(config: ModelConfig, changes: Mapping[str, Any], what: str) -> ModelConfig:
    """Returns a copy of a configuration with settings that the caller names.

    Args:
        what: The function that they are arguments of, for the message.

    Raises:
        ValueError: A name is no setting of the configuration, or its value is not allowed.
    """
    changed = config.with_changes()
    for name, value in changes.items():
        is_setting = hasattr(changed, name) or name in CALL_SETTINGS
        if not is_setting or name.startswith("_") or callable(getattr(changed, name)):
            known = [field.name for field in fields(changed)]
            known += [*changed.attribute_map, *CALL_SETTINGS, *HUB, *LOADING]
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"{what} has no argument {name!r}, and {type(config).__name__} no such setting{meant}"
            )
        setattr(changed, name, value)
    return changed
