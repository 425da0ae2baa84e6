"""Adds LoRA weights to a model of the zoo, and exchanges them with peft, under transformers' names
of the modules.

The configuration is peft's `LoraConfig`, and the files are peft's: `adapter_config.json` and
`adapter_model.safetensors`, for transformers' model of the same architecture. Where the zoo stacks
several modules of transformers in one layer (q, k and v), each has factors of its own, as in peft.
"""

from __future__ import annotations

import copy
import hashlib
import math
import reprlib
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.dtypes import FLOATS, torch_name
from ..checkpoint.folder_files import WEIGHT_SUFFIXES
from ..checkpoint.layout import LowRankUpdate, ParameterPlacement, ParameterSpec, TensorSlice
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.rank_files import write_tensors
from ..checkpoint.safetensors_header import read_header
from ..checkpoint.stored_tensor import StoredTensor, index_by_name
from ..checkpoint.tensor_reader import TensorReader
from ..files.expressions import check_matching_time, compile_expression
from ..files.hashing import hash_file
from ..files.safe_paths import checked_file
from ..files.strict_json import read_json_object
from ..mpu import ParallelMesh, gather_from_tp, initialize, tp_size
from ..mpu.collectives import gather_rows
from ..mpu.initialization import Receive
from ..mpu.mesh import axis_ranks, axis_sizes
from .auto import build_on_meta
from .blocks.expert_lora import ExpertAdapter, ExpertFactors
from .blocks.lora import LINEARS, AdaptedRows, Adapter, LoraFactors, attach, detach
from .hf_state import gather_experts
from .mapping import (
    NativeModel,
    compute_stacked_ranges,
    compute_stored_shape,
    config_errors,
    slice_stored,
)
from .name_map import NameEntry
from .packing import find_packed_parameters, unpack_parameters
from .pipeline import find_copied_parameters

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of peft's names
# The fields of LoraConfig that models of the zoo follow, and those that describe the file alone.
SUPPORTED = frozenset(
    {
        "r",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "modules_to_save",
        "init_lora_weights",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "fan_in_fan_out",
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
        "megatron_core",
    }
)
# Settings of peft that select nothing if they are empty.
EMPTY_SELECTIONS = frozenset({"layer_replication"})
INITIAL_VALUES = (True, "gaussian")
LARGEST_FLOAT = sys.float_info.max


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= LARGEST_FLOAT


def _are_names(value: Any) -> bool:
    if not isinstance(value, (list, set, tuple)):
        return False
    return all(isinstance(name, str) for name in cast(list[Any], value))


def _is_expression(value: Any) -> bool:
    return isinstance(value, str)  # `_list_expressions` knows how peft will use it.


def _is_pattern(value: Any, is_right: Callable[[Any], bool]) -> bool:
    if not isinstance(value, dict):
        return False
    items = cast(dict[Any, Any], value).items()
    return all(_is_expression(key) and is_right(entry) for key, entry in items)


def _is_dropout(value: Any) -> bool:
    return value == 0 or (_is_factor(value) and value < 1)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _name_modules(value: Any) -> bool:
    return _are_names(value) or _is_expression(value)


def _number_blocks(value: Any) -> bool:
    if isinstance(value, list):
        return all(type(block) is int for block in cast(list[Any], value))
    return type(value) is int


# Field -> whether a value is right, and what is. peft takes other values too, and fails later.
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a whole number of at least 1"),
    "lora_alpha": (_is_factor, "a finite number above 0"),
    "lora_dropout": (_is_dropout, "at least 0 and below 1"),
    "use_rslora": (_is_flag, "True or False"),
    "rank_pattern": (
        partial(_is_pattern, is_right=_is_rank),
        "a dict of regular expressions and ranks of at least 1",
    ),
    "alpha_pattern": (
        partial(_is_pattern, is_right=_is_factor),
        "a dict of regular expressions and numbers above 0",
    ),
    "target_modules": (_name_modules, "names of modules or one regular expression"),
    "exclude_modules": (_name_modules, "names of modules or one regular expression"),
    "layers_pattern": (_name_modules, "names of modules or one regular expression"),
    "target_parameters": (_are_names, "a list of names of parameters"),
    "modules_to_save": (_are_names, "a list of names of modules"),
    "layers_to_transform": (_number_blocks, "a number or a list of numbers of blocks"),
    "base_model_name_or_path": (_is_text, "a name or a folder"),
}
# The types that the pipeline stages tell one another by their place in this list.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class LinearModule:
    """A linear module of transformers' model, and the part of the zoo's model that is its weight.

    Attributes:
        name: The module's name in transformers' model.
        parameter: The parameter of the zoo's model that holds the weight.
        rows: The range [start, stop) of the parameter's rows that is the weight.
        transposed: Whether transformers stores the weight as [in, out].
    """

    name: str
    parameter: ParameterSpec
    rows: tuple[int, int]
    transposed: bool

    @property
    def layer(self) -> str:
        """The name of the layer of the zoo's model that holds the parameter."""
        return self.parameter.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """The name of the factors in the layer's adapter."""
        return self.name.rpartition(".")[2]


# The zoo's names of stacked experts -> transformers'.
EXPERT_PARAMETERS = {"gate_up": "gate_up_proj", "down": "down_proj"}


@dataclass(frozen=True)
class ExpertParameter:
    """The stacked matrices of a mixture that have factors.

    Attributes:
        layer: The name of the zoo's `ParallelExperts`.
        weight: The name of their parameter there.
        module: The name of transformers' module of the experts.
        nesting: How many of the module's wrappers are around that of this parameter in peft's model.
    """

    layer: str
    weight: str
    module: str
    nesting: int = 0

    @property
    def key(self) -> str:
        """The name of the parameter in transformers' module, and of the factors in the adapter."""
        return EXPERT_PARAMETERS[self.weight]

    def name_factor(self, factor: str) -> tuple[str, str]:
        """Returns the zoo's and peft's name of `lora_A` or `lora_B`."""
        native = f"{self.layer}.adapter.{self.key}.{factor}"
        return native, f"{PREFIX}{self.module}.{'base_layer.' * self.nesting}{factor}.weight"


@dataclass(frozen=True)
class Lora:
    """The LoRA weights of a model, as its attribute `lora` describes them.

    Attributes:
        config: peft's LoraConfig.
        modules: The modules with factors, on all pipeline stages.
        saved: The parameters that are trained besides, whole: name -> names of the tensors that are
            stored for it.
        experts: The stacked experts with factors, on all pipeline stages.
    """

    config: Any
    modules: tuple[LinearModule, ...]
    saved: Mapping[str, tuple[str, ...]]
    experts: tuple[ExpertParameter, ...] = ()


def import_peft() -> Any:
    """Returns the module peft. ValueError if it is not installed."""
    try:
        import peft
    except ImportError:
        raise ValueError('LoRA needs the package peft: pip install "shardzoo[lora]"') from None
    return peft


def lora_config(**settings: Any) -> Any:
    """Returns peft's LoraConfig.

    Raises ValueError for settings that peft refuses, or that the zoo's models do not follow.
    """
    peft = import_peft()
    try:
        config = peft.LoraConfig(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"LoRA: {error}") from None
    check_lora_config(config)
    return config


def check_lora_config(config: Any) -> None:
    """Raises ValueError for a configuration of peft that the zoo's models do not follow."""
    peft = import_peft()
    if not isinstance(config, peft.LoraConfig):
        raise ValueError(
            f"models of the zoo are adapted by LoRA: a LoraConfig is needed, not a "
            f"{type(config).__name__}"
        )
    plain = peft.LoraConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        selects_nothing = field.name in EMPTY_SELECTIONS and not value
        if field.name in SUPPORTED or selects_nothing:
            continue
        if value != getattr(plain, field.name):
            raise ValueError(
                f"LoRA: models of the zoo do not support {field.name}={reprlib.repr(value)}; leave "
                "it out, or use transformers' model in one process"
            )
    initial = config.init_lora_weights
    if initial not in INITIAL_VALUES:
        raise ValueError(
            f"LoRA: init_lora_weights must be True or 'gaussian', not {reprlib.repr(initial)}"
        )
    for name, (is_right, wanted) in CHECKS.items():
        value = getattr(config, name)
        if not is_right(value) and value is not getattr(plain, name):
            raise ValueError(f"LoRA: {name} must be {wanted}, not {reprlib.repr(value)}")
    for name, expression in _list_expressions(config):
        compile_expression(expression, f"LoRA: {name}:")


def _list_expressions(config: Any) -> Iterator[tuple[str, str]]:
    """Yields the regular expressions that peft makes of a configuration, with the field's name.

    After peft's `check_target_module_exists` and `get_pattern_key`.
    """
    for name in ("target_modules", "exclude_modules"):
        value = getattr(config, name)
        if isinstance(value, str):
            yield name, value
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, name) or ():
            yield name, rf"(.*\.)?({pattern})$"
    for module in config.modules_to_save or ():
        yield "modules_to_save", rf"(^|.*\.){module}($|\..*)"
    patterns = config.layers_pattern or ()
    if isinstance(patterns, str):
        patterns = [patterns]
    for pattern in patterns:
        yield "layers_pattern", rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."


def add_lora(model: Any, config: Any, seed: int = 1234) -> None:
    """Adds LoRA weights to a model, in place, and freezes all parameters but those and
    `modules_to_save`.

    The initial values depend on the seed and the parameters' names, and not on how the model is
    split: A is uniform as in peft, B is zero.

    Args:
        model: The model, or a pipeline stage of it.
        config: What `lora_config` returns. Without target modules, they are peft's default for the
            model type.

    Raises:
        ValueError: The targets do not exist or are no linear layers, or the model has LoRA weights
        already.
    """
    attach_factors(model, config)
    fill_base = getattr(model, "fill_parameters", None)
    if fill_base is None or not next(model.parameters()).is_meta:
        initialize_factors(model, seed)
        return

    def fill_all(receive: Receive) -> None:
        fill_base(receive)
        initialize_factors(model, seed, receive)

    model.fill_parameters = fill_all


def initialize_factors(model: Any, seed: int, receive: Receive | None = None) -> None:
    """Gives the factors of a model their initial values, or sends these to `receive`. Collective."""
    fill = partial(_fill_factor, model.lora.config)
    for path, adapter in find_adapters(model).items():
        initialize(adapter, fill, seed, model.mesh, prefix=f"{path}.adapter", receive=receive)
    for path, adapter in find_expert_adapters(model).items():
        fill = partial(_fill_expert_factor, model.lora.config, adapter)
        initialize(adapter, fill, seed, model.mesh, prefix=f"{path}.adapter", receive=receive)


def _fill_expert_factor(
    config: Any, adapter: ExpertAdapter, name: str, full: Tensor, generator: torch.Generator
) -> None:
    """Sets initial values as `_fill_factor` does; A of `down` is transposed."""
    _, key, factor = name.rsplit(".", 2)
    pair: Any = adapter.get_submodule(key)
    if factor == "lora_B":
        full.zero_()
    elif config.init_lora_weights == "gaussian":
        full.normal_(0.0, 1 / pair.r, generator=generator)
    else:
        fan_in = full.shape[0] // pair.count if pair.is_down else full.shape[1]
        bound = 1 / math.sqrt(fan_in)
        full.uniform_(-bound, bound, generator=generator)


def _fill_factor(config: Any, name: str, full: Tensor, generator: torch.Generator) -> None:
    """Sets initial values as peft does: A is uniform (Kaiming, a = √5) or normal, B is zero."""
    if name.endswith("lora_B"):
        full.zero_()
    elif config.init_lora_weights == "gaussian":
        full.normal_(0.0, 1 / full.shape[0], generator=generator)
    else:
        bound = 1 / math.sqrt(full.shape[1])
        full.uniform_(-bound, bound, generator=generator)


def attach_factors(model: Any, config: Any) -> None:
    """Freezes the model and adds factors without values to its layers."""
    if getattr(model, "lora", None) is not None:
        raise ValueError("the model has LoRA weights already; load the base model again for others")
    native = NativeModel.from_config(model.config)
    config = copy.copy(config)
    experts = _choose_experts(native, config)
    chosen = _choose_modules(model, native, config)
    saved = _find_saved_parameters(native, config.modules_to_save or ())
    packed = sorted(find_packed_parameters(model).keys() & saved.keys())
    if packed:
        raise ValueError(
            f"LoRA: modules_to_save name {packed[0]}, which is packed and cannot be trained; leave it "
            "out, or load the model without base_precision"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name in saved

    by_layer: dict[str, list[LinearModule]] = {}
    for module in chosen:
        by_layer.setdefault(module.layer, []).append(module)
    for path, modules in by_layer.items():
        layer = model.get_submodule(path)
        weight = getattr(layer, modules[0].parameter.name.rpartition(".")[2])
        if weight is not None:  # Otherwise another pipeline stage has the layer.
            attach(layer, _make_adapter(layer, modules, config).to(weight.device))
    for path in dict.fromkeys(parameter.layer for parameter in experts):
        layer = model.get_submodule(path)
        if layer.down is not None:
            own = [parameter for parameter in experts if parameter.layer == path]
            layer.adapter = _make_expert_adapter(layer, own, config).to(layer.down.device)
    model.lora = Lora(config, chosen, saved, experts)


def _choose_experts(native: NativeModel, config: Any) -> tuple[ExpertParameter, ...]:
    """Returns the stacked experts that `target_parameters` name.

    Raises ValueError if a name matches none, or with settings that peft refuses for parameters.
    """
    targets: list[str] = sorted(config.target_parameters or ())
    if not targets:
        return ()
    if config.lora_dropout:
        raise ValueError(
            f"LoRA: lora_dropout={config.lora_dropout} does not work with target_parameters, whose "
            "factors are added to the experts' matrices; use 0"
        )
    known = list_stacked_experts(native)
    names = {parameter: f"{parameter.module}.{parameter.key}" for parameter in known}
    for target in targets:
        if not any(_is_part(target, name) for name in names.values()):
            keys = dict.fromkeys(f"mlp.experts.{parameter.key}" for parameter in known)
            raise ValueError(
                f"LoRA: target_parameters {target!r} match no stacked experts of the model, which has "
                f"{', '.join(keys) or 'none'}"
            )
    found = [
        parameter
        for parameter in known
        if any(_is_part(target, names[parameter]) for target in targets)
    ]
    chosen: list[ExpertParameter] = []
    for number, parameter in enumerate(found):
        # peft wraps a module once for each parameter, the first one innermost.
        later = [other for other in found[number + 1 :] if other.layer == parameter.layer]
        chosen.append(replace(parameter, nesting=len(later)))
    return tuple(chosen)


def list_stacked_experts(native: NativeModel) -> list[ExpertParameter]:
    """Returns the matrices of experts that transformers stacks too, as it does those with gates."""
    known: list[ExpertParameter] = []
    for name, entry in native.entries().items():
        layer, _, weight = name.rpartition(".")
        if f"{layer}.gate_up" not in native.parameters or weight not in EXPERT_PARAMETERS:
            continue
        if not layer.endswith(".experts"):
            continue
        mixture = native.to_hf_name(entry.stored_names()[0]).partition(".experts.")[0]
        module = f"{mixture.rpartition('.')[0]}.mlp.experts"
        known.append(ExpertParameter(layer, weight, module))
    return known


def _make_expert_adapter(
    layer: Any, parameters: list[ExpertParameter], config: Any
) -> ExpertAdapter:
    """Makes the factors of a mixture's experts."""
    factors: dict[str, ExpertFactors] = {}
    for parameter in parameters:
        name = f"{parameter.module}.{parameter.key}"
        rank = _find_pattern_value(config.rank_pattern, name, config.r)
        alpha = _find_pattern_value(config.alpha_pattern, name, config.lora_alpha)
        divisor = math.sqrt(rank) if config.use_rslora else rank
        factors[parameter.key] = ExpertFactors(layer, parameter.weight, rank, alpha / divisor)
    return ExpertAdapter(factors)


def _make_adapter(layer: Any, modules: list[LinearModule], config: Any) -> Adapter:
    """Makes the factors of a layer that holds the weights of `modules`."""
    factors: dict[str, LoraFactors] = {}
    for module in modules:
        shape = cast(tuple[int, int], module.parameter.shape)
        rank = _find_pattern_value(config.rank_pattern, module.name, config.r)
        alpha = _find_pattern_value(config.alpha_pattern, module.name, config.lora_alpha)
        if rank > max(shape):
            raise ValueError(
                f"LoRA: the rank {rank} is above both sizes of {module.name}, "
                f"{shape[0]} x {shape[1]}"
            )
        divisor = math.sqrt(rank) if config.use_rslora else rank
        factors[module.key] = LoraFactors(
            AdaptedRows(shape, module.parameter.shard, *module.rows),
            rank,
            alpha / divisor,
            config.lora_dropout,
            sequence_parallel=getattr(layer, "sequence_parallel", False),
            mesh=getattr(layer, "mesh", None),
        )
    attributes = [name for name, _ in layer.named_parameters(recurse=False)]
    if "weight" in attributes:
        return Adapter(layer, factors, ())
    # A layer with several outputs has a parameter for each of them.
    names = [module.parameter.name.rpartition(".")[2] for module in modules]
    return Adapter(layer, factors, [attributes.index(name) for name in names])


def _find_pattern_value(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Returns the value of a module in peft's `rank_pattern` or `alpha_pattern`."""
    if not patterns:
        return default
    return patterns.get(import_peft().utils.other.get_pattern_key(list(patterns), name), default)


def _list_matrices(native: NativeModel) -> Iterator[LinearModule]:
    """Yields the modules of transformers' model that have a matrix, in the order of the
    parameters.
    """
    for name, entry in native.entries().items():
        spec = native.parameters[name]
        if len(spec.shape) != 2:
            continue
        ranges = compute_stacked_ranges(spec, entry)
        for stored, span in zip(entry.stored_names(), ranges, strict=True):
            module_name = native.to_hf_name(stored).removesuffix(".weight")
            rows = span if spec.dim == 0 else (0, spec.shape[0])
            yield LinearModule(module_name, spec, rows, entry.transpose)


def _choose_modules(model: Any, native: NativeModel, config: Any) -> tuple[LinearModule, ...]:
    """Returns the modules that the configuration names, and completes its target_modules.

    Raises ValueError if it names none, or one that is no linear layer.
    """
    peft = import_peft()
    known = list(_list_matrices(native))
    expressions = [expression for _, expression in _list_expressions(config)]
    check_matching_time(expressions, [module.name for module in known], "LoRA: the expression")
    linear = [module for module in known if isinstance(model.get_submodule(module.layer), LINEARS)]
    targets: Any = config.target_modules
    if not targets and config.target_parameters:
        config.target_modules = None
        return ()
    if not targets:
        defaults = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        targets = defaults.get(native.config.model_type)
        if targets is None:
            raise ValueError(
                f"LoRA: peft has no default targets for a {native.config.model_type}; name "
                f"target_modules, of {_list_keys(linear)}, or 'all-linear'"
            )
    if isinstance(targets, str) and targets.lower() == "all-linear":
        heads: set[str] = set(getattr(model, "head_modules", ()))
        targets = [module.name for module in linear if module.layer.partition(".")[0] not in heads]
    config.target_modules = targets if isinstance(targets, str) else sorted(targets)
    is_named = peft.tuners.tuners_utils.check_target_module_exists
    found = [module for module in known if is_named(config, module.name)]
    _check_targets(found, linear, config)
    config.fan_in_fan_out = any(module.transposed for module in found)
    return tuple(found)


def _check_targets(found: list[LinearModule], linear: list[LinearModule], config: Any) -> None:
    """Raises ValueError unless each target is a linear layer and each name of a target has one.

    Args:
        found: The modules that the configuration names.
        linear: The modules that can have factors.
    """
    others = [module.name for module in found if module not in linear]
    if others:
        raise ValueError(
            f"LoRA: target_modules match {others[0]}, which is no linear layer inside the model; "
            "name it in modules_to_save to train it whole"
        )
    targets: str | list[str] = config.target_modules
    if isinstance(targets, str):  # a regular expression
        unmatched = [] if found else [targets]
    else:
        unmatched = [
            name for name in targets if not any(_is_part(name, module.name) for module in linear)
        ]
        if not found and not unmatched:
            unmatched = targets
    if unmatched:
        raise ValueError(
            f"LoRA: target_modules {unmatched[0]!r} match no linear layer of the model, which has "
            f"{_list_keys(linear)}"
        )


def _is_part(name: str, module: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _list_keys(linear: list[LinearModule]) -> str:
    return ", ".join(dict.fromkeys(module.key for module in linear))


def _find_saved_parameters(
    native: NativeModel, names: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Finds the parameters of modules of transformers' model whose names end with one of `names`.

    That is what peft's `modules_to_save` means.

    Returns:
        Native name -> names of the tensors that are stored for it.

    Raises:
        ValueError: A name matches nothing, or a module that the zoo cannot train alone.
    """
    entries = native.entries()
    own = {stored for entry in entries.values() for stored in entry.stored_names()}
    tied: set[str] = set()
    for alias, kept in dict(native.name_map.aliases).items():
        if alias not in own:
            tied.update((alias, kept))

    saved: dict[str, tuple[str, ...]] = {}
    matched: set[str] = set()
    for native_name, entry in entries.items():
        stored = tuple(native.to_hf_name(name) for name in entry.stored_names())
        hits = [[name for name in names if _is_inside(tensor, name)] for tensor in stored]
        if not any(hits):
            continue
        matched.update(*hits)
        if not all(hits):
            raise ValueError(
                f"LoRA: modules_to_save name a part of {', '.join(stored)}, which are one layer "
                "here"
            )
        shared = sorted(tied.intersection(entry.stored_names()))
        if shared:
            raise ValueError(
                f"LoRA: modules_to_save name {shared[0]}, which the model shares with its output "
                "head or another embedding, and peft would train only one of them; use a model "
                "with weights of their own"
            )
        saved[native_name] = stored

    unknown = sorted(set(names) - matched)
    if unknown:
        modules = [
            name.rpartition(".")[0] for name in own if ".{" not in name and name.count(".") < 3
        ]
        raise ValueError(
            f"LoRA: modules_to_save {unknown[0]!r} matches no module of the model; it has "
            f"{', '.join(dict.fromkeys(modules))}"
        )
    return saved


def _is_inside(tensor: str, name: str) -> bool:
    """Returns whether a tensor belongs to a module whose name ends with `name`."""
    parts = tensor.split(".")[:-1]
    return any(".".join(parts[: end + 1]).endswith(name) for end in range(len(parts)))


def list_stored_modules(model: Any, native_names: Collection[str]) -> list[str]:
    """Returns transformers' names of modules of the zoo's model, such as those of a new head."""
    native = NativeModel.from_config(model.config)
    names: list[str] = []
    for name, entry in native.entries().items():
        if any(name.startswith(f"{module}.") for module in native_names):
            names += [
                native.to_hf_name(stored).rpartition(".")[0] for stored in entry.stored_names()
            ]
    return list(dict.fromkeys(names))


def find_adapters(model: nn.Module) -> dict[str, Adapter]:
    """Returns the adapters of this rank's layers by the layers' names."""
    found: dict[str, Adapter] = {}
    for name, module in cast(Any, model).named_modules():
        if isinstance(module, Adapter):
            found[name.removesuffix(".adapter")] = module
    return found


def find_expert_adapters(model: nn.Module) -> dict[str, ExpertAdapter]:
    """Returns the adapters of this rank's mixtures by the names of their experts."""
    found: dict[str, ExpertAdapter] = {}
    for name, module in cast(Any, model).named_modules():
        if isinstance(module, ExpertAdapter):
            found[name.removesuffix(".adapter")] = module
    return found


@contextmanager
def adapters_disabled(model: nn.Module) -> Generator[None]:
    """A context in which the model computes what it does without its LoRA weights.

    Parameters that are trained whole (`modules_to_save`) keep their trained values.
    """
    adapters = [*find_adapters(model).values(), *find_expert_adapters(model).values()]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def list_peft_names(model: Any) -> dict[str, tuple[str, ...]]:
    """Returns name of a parameter that LoRA trains -> its names in peft's file, on all stages."""
    lora: Lora = model.lora
    names: dict[str, tuple[str, ...]] = {}
    for module in lora.modules:
        for factor in ("lora_A", "lora_B"):
            native = f"{module.layer}.adapter.{module.key}.{factor}"
            names[native] = (f"{PREFIX}{module.name}.{factor}.weight",)
    for parameter in lora.experts:
        for factor in ("lora_A", "lora_B"):
            native, stored_name = parameter.name_factor(factor)
            names[native] = (stored_name,)
    for native, stored in lora.saved.items():
        names[native] = tuple(PREFIX + name for name in stored)
    return names


@torch.no_grad()
def gather_weights(model: Any) -> dict[str, Tensor]:
    """Returns what LoRA trains, whole and on the CPU, under peft's names, on every rank.
    Collective.
    """
    native = NativeModel.from_config(model.config)
    entries = native.entries()
    names = list_peft_names(model)
    copied = find_copied_parameters(model)
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name not in names or name in copied:
            continue
        whole = _gather_parameter(parameter, model.mesh).cpu()
        if name in entries:
            parts = _unstack(whole, native.parameters[name], entries[name])
        elif isinstance(owner := model.get_submodule(name.rpartition(".")[0]), ExpertFactors):
            parts = [owner.to_peft(name.rpartition(".")[2], whole)]
        else:  # A factor is stored as it is.
            parts = [whole]
        found.update(zip(names[name], parts, strict=True))
    mesh: ParallelMesh | None = model.mesh
    if mesh is None or mesh.pp_size == 1:
        return found
    in_order = [part for parts in names.values() for part in parts]
    return _gather_stages(found, in_order, mesh, next(model.parameters()).device)


def _gather_stages(
    found: dict[str, Tensor], names: list[str], mesh: ParallelMesh, device: torch.device
) -> dict[str, Tensor]:
    """Returns the tensors of all pipeline stages on every stage. Collective.

    Args:
        found: This stage's tensors, of at most two dimensions.
        names: The names of the tensors of all stages; one stage has each of them.
        device: Where the stages exchange tensors.
    """
    # A row for each tensor: its shape, with zeros behind, and the place of its type in DTYPES.
    headers = torch.zeros(len(names), 3, dtype=torch.int64)
    for row, name in enumerate(names):
        if name in found:
            shape = found[name].shape
            headers[row, : len(shape)] = torch.tensor(shape)
            headers[row, 2] = DTYPES.index(found[name].dtype)
    headers = headers.to(device)
    cast(Any, dist).all_reduce(headers, group=mesh.pp_group)

    gathered: dict[str, Tensor] = {}
    rows = cast(list[list[int]], cast(Any, headers).tolist())
    for name, (*shape, number) in zip(names, rows, strict=True):
        dtype = DTYPES[number]
        own = found.get(name)
        if own is None:
            own = torch.zeros([size for size in shape if size], dtype=dtype)
        # Sum the bytes as whole numbers, to which the zeros of the other stages add nothing.
        data = own.to(device, copy=True).view(torch.uint8)
        cast(Any, dist).all_reduce(data, group=mesh.pp_group)
        gathered[name] = data.cpu().view(dtype)
    return gathered


def _gather_parameter(parameter: Any, mesh: ParallelMesh | None) -> Tensor:
    """Returns the full, unpadded value of a parameter. Collective over the tensor-parallel
    ranks, and under FSDP over the data-parallel ranks.
    """
    shard = getattr(parameter, "shard", None)
    parameter = gather_rows(parameter)
    if shard is not None and shard.splits_experts:
        return gather_experts(parameter.detach(), shard, mesh)
    size = tp_size(mesh)
    if shard is None or (size == 1 and tuple(parameter.shape) == shard.shape):
        return parameter.detach().clone()
    # The first rank's part is the longest; the ranks exchange parts of that length.
    dim = shard.dim
    longest = shard.local_shape(0, size)
    padded = parameter.new_zeros(longest)
    padded.narrow(dim, 0, parameter.shape[dim]).copy_(parameter)
    gathered = torch.split(gather_from_tp(padded, mesh, dim), longest[dim], dim)
    parts: list[Tensor] = []
    for rank, part in enumerate(gathered):
        parts.append(part.narrow(dim, 0, shard.local_shape(rank, size)[dim]))
    return shard.merge(parts)


def _unstack(whole: Tensor, spec: ParameterSpec, entry: NameEntry) -> list[Tensor]:
    """Returns the tensors that are stored for a parameter."""
    if whole.dim() == 0:
        return [whole.contiguous()]
    parts: list[Tensor] = []
    for start, stop in compute_stacked_ranges(spec, entry):
        part = whole.narrow(spec.dim, start, stop - start)
        if entry.transpose:
            part = part.t()
        parts.append(part.contiguous())
    return parts


def write_adapter_config(folder: Path, config: Any, base: str) -> None:
    """Writes peft's configuration of an adapter of the model `base`."""
    config = copy.copy(config)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(folder))


def save_adapter(model: Any, folder: str | Path, base: str = "") -> None:
    """Writes the LoRA weights of a model as peft's files, for transformers' model. Collective.

    Args:
        folder: A new or existing folder, which the first rank writes.
        base: The name of the base model; by default the folder that the model was loaded from.
    """
    weights = gather_weights(model)
    if not dist.is_initialized() or cast(Any, dist).get_rank() == 0:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        base = base or getattr(model, "name_or_path", "") or ""
        write_adapter_config(folder, model.lora.config, base)
        write_tensors(folder / WEIGHTS_FILE, weights)
    if dist.is_initialized():
        cast(Any, dist).barrier()


def hash_model(folder: Path) -> str:
    """Returns the sha256 of a model on disk.

    It is that of its manifest, which has those of the tensors, or of its weight files. Names of
    files and their contents count; other files such as the tokenizer's do not.
    """
    files = [folder / MANIFEST]
    if not files[0].exists():
        files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{hash_file(path)}\0".encode())
    return digest.hexdigest()


def check_same_lora(model: Any, folder: Path) -> None:
    """Raises ValueError if a folder of peft has factors of other ranks or scales than the model."""
    stored = read_adapter_config(folder)
    own = model.lora.config
    for name in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
        mine = getattr(own, name)
        theirs = getattr(stored, name)
        if mine != theirs:
            raise ValueError(
                f"{folder} was trained with {name}={theirs!r}, and cannot go on with {mine!r}"
            )


def read_adapter_config(folder: Path) -> Any:
    """Returns the LoraConfig of a folder that peft or `save_adapter` wrote.

    Raises ValueError if there is none, or one of another kind of adapter.
    """
    if not (folder / CONFIG_FILE).exists():
        raise ValueError(f"{folder} holds no adapter: it has no {CONFIG_FILE}")
    values = read_json_object(checked_file(folder, CONFIG_FILE))
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"{folder / CONFIG_FILE} describes an adapter of type {reprlib.repr(kind)}, not LORA"
        )
    known = {field.name for field in fields(import_peft().LoraConfig)}
    for name in values.keys() - known:
        if values[name]:
            raise ValueError(
                f"{folder / CONFIG_FILE} has {name}={reprlib.repr(values[name])}, which this "
                "release of peft lacks"
            )
    try:
        return lora_config(**{name: value for name, value in values.items() if name in known})
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from None


def load_adapter(model: Any, folder: str | Path) -> None:
    """Adds the LoRA weights in a folder of peft to a model, in place, and freezes all other
    parameters.

    Raises ValueError if the folder is damaged or its weights are not those of the model.
    """
    path = Path(folder)
    attach_factors(model, read_adapter_config(path))
    load_weights(model, path)


@torch.no_grad()
def load_weights(model: Any, folder: Path) -> None:
    """Reads the values of what LoRA trains from peft's file."""
    stored = _read_stored_weights(model, folder)
    names = list_peft_names(model)
    entries = NativeModel.from_config(model.config).entries()
    with TensorReader() as reader:
        for name, parameter in model.named_parameters():
            if name in names:
                tensors = [stored[part] for part in names[name]]
                transposed = name in entries and entries[name].transpose
                _fill_parameter(reader, tensors, parameter, model, name, transposed)


def _read_stored_weights(model: Any, folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of peft's file.

    Raises ValueError unless they are those that the model's configuration names.
    """
    path = folder / WEIGHTS_FILE
    stored = index_by_name(read_header(checked_file(folder, WEIGHTS_FILE))[0])
    wanted = {part for parts in list_peft_names(model).values() for part in parts}
    missing = sorted(wanted - stored.keys())
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing[:3])}")
    unexpected = sorted(stored.keys() - wanted)
    if unexpected:
        raise ValueError(
            f"{path} has {', '.join(unexpected[:3])}, which the model and the configuration do not "
            "name"
        )
    for tensor in stored.values():
        if tensor.dtype not in FLOATS:
            raise ValueError(
                f"{tensor} has type {torch_name(tensor.dtype)}, but must have a floating-point type"
            )
    return stored


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter on disk for a model that is not built.

    Attributes:
        updates: Native name of a parameter -> what is added to it.
        saved: Native name of a parameter -> where its new value is.
    """

    files: tuple[Path, Path]
    updates: Mapping[str, tuple[LowRankUpdate, ...]]
    saved: Mapping[str, ParameterPlacement]


def open_adapter(native: NativeModel, folder: Path) -> StoredAdapter:
    """Opens a folder of peft for a model. Raises ValueError as `load_adapter` does."""
    config = read_adapter_config(folder)
    with torch.device("meta"), config_errors():
        model: Any = build_on_meta(native.config, None)
        attach_factors(model, config)
    if model.lora.experts:
        raise ValueError(
            f"{folder} adapts experts (target_parameters), which are not merged from files; load it by "
            "shardzoo.from_pretrained(base, adapter=folder), merge it by shardzoo.models.lora.merge_lora "
            "and save it by save_pretrained"
        )
    stored = _read_stored_weights(model, folder)
    names = list_peft_names(model)
    layers = find_adapters(model)

    updates: dict[str, tuple[LowRankUpdate, ...]] = {}
    for module in model.lora.modules:
        factors: LoraFactors = getattr(layers[module.layer], module.key)
        adapter_name = f"{module.layer}.adapter.{module.key}"
        lora_a = stored[names[f"{adapter_name}.lora_A"][0]]
        lora_b = stored[names[f"{adapter_name}.lora_B"][0]]
        _check_shape(lora_a, tuple(factors.lora_A.shape))
        _check_shape(lora_b, tuple(factors.lora_B.shape))
        update = LowRankUpdate(module.rows, factors.scaling, lora_a, lora_b)
        earlier = updates.get(module.parameter.name, ())
        updates[module.parameter.name] = (*earlier, update)

    entries = native.entries()
    saved: dict[str, ParameterPlacement] = {}
    for name in model.lora.saved:
        tensors = [stored[part] for part in names[name]]
        saved[name] = _place_saved(native.parameters[name], entries[name], tensors)
    return StoredAdapter((folder / CONFIG_FILE, folder / WEIGHTS_FILE), updates, saved)


def _check_shape(tensor: StoredTensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ValueError(f"{tensor} has shape {list(tensor.shape)}, but {list(expected)} is needed")


def _place_saved(
    spec: ParameterSpec, entry: NameEntry, tensors: list[StoredTensor]
) -> ParameterPlacement:
    """Returns where an adapter stores the whole value of a parameter."""
    parts: list[TensorSlice] = []
    for tensor, span in zip(tensors, compute_stacked_ranges(spec, entry), strict=True):
        _check_shape(tensor, compute_stored_shape(spec, span, entry))
        parts += slice_stored(tensor, span, spec, entry)
    return ParameterPlacement(spec.name, spec.shape or (1,), spec.dim, (tuple(parts),))


def _fill_parameter(
    reader: TensorReader,
    stored: list[StoredTensor],
    parameter: Any,
    model: Any,
    name: str,
    transposed: bool,
) -> None:
    """Sets this rank's part of a parameter to the values of the tensors that are stacked in it.

    Raises ValueError if their shapes are not the parameter's.
    """
    parts = [reader.whole(tensor) for tensor in stored]
    path, _, factor = name.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(owner, ExpertFactors):
        _check_shape(stored[0], owner.list_peft_shapes()[factor])
        parts = [owner.from_peft(factor, parts[0])]
    if transposed:
        parts = [part.t() for part in parts]
    shard = getattr(parameter, "shard", None)
    expected = tuple(parameter.shape if shard is None else shard.shape)
    whole = None
    if len(parts) == 1:
        whole = parts[0]
    elif parts[0].dim() and len({part.shape[1:] for part in parts}) == 1:
        whole = torch.cat(parts, 0)
    if whole is None or tuple(whole.shape) != expected:
        raise ValueError(
            f"{stored[0]} has shape {list(stored[0].shape)}, but {list(expected)} are needed in all"
        )
    if shard is not None:
        whole = shard.slice(whole, axis_ranks(model.mesh), axis_sizes(model.mesh))
    sharded = getattr(parameter, "sharded", None)
    if sharded is not None:  # FSDP
        sharded.fill(whole)
    else:
        parameter.copy_(whole)


@torch.no_grad()
def compute_merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's adapted weights with the factors' products added, by name."""
    merged: dict[str, Tensor] = {}
    for path, adapter in find_adapters(model).items():
        layer = model.get_submodule(path)
        names = [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]
        outputs = adapter.outputs or [0] * len(adapter.factors)
        for output, factors in zip(outputs, adapter.factors, strict=True):
            name = f"{path}.{names[output]}"
            weight = merged.get(name, layer.get_parameter(names[output]))
            merged[name] = factors.add_to(weight)
    for path, adapter in find_expert_adapters(model).items():
        experts = model.get_submodule(path)
        for pair in adapter.factors:
            merged[f"{path}.{pair.weight}"] = pair.add_to(experts.get_parameter(pair.weight))
    return merged


@torch.no_grad()
def merge_lora(model: Any) -> None:
    """Adds the factors' products to the weights, in place, and removes the factors.

    Packed weights are unpacked first.
    """
    unpack_parameters(model)
    for name, value in compute_merged_weights(model).items():
        model.get_parameter(name).copy_(value)
    for path in find_adapters(model):
        detach(model.get_submodule(path))
    for path in find_expert_adapters(model):
        experts: Any = model.get_submodule(path)
        del experts.adapter
        experts.adapter = None
    model.lora = None
