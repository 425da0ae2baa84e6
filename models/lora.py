"""Adds LoRA weights to a model of the zoo, and exchanges them with peft, under transformers' names of the modules.

The configuration is peft's `LoraConfig`, and the files are peft's: `adapter_config.json` and
`adapter_model.safetensors`, for transformers' model of the same architecture. Where the zoo stacks several modules of
transformers in one layer (q, k and v), each has factors of its own, as in peft.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
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
from ..files.hashing import hash_file
from ..files.safe_paths import checked_file
from ..files.strict_json import read_json_object
from ..mpu import ParallelMesh, gather_from_tp, initialize, tp_rank, tp_size
from .auto import build_on_meta
from .blocks.lora import LINEARS, AdaptedRows, Adapter, LoraFactors, attach, detach
from .mapping import NativeModel, compute_stacked_ranges, compute_stored_shape, config_errors
from .name_map import NameEntry
from .pipeline import find_copied_parameters

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of peft's names
# The fields of peft's LoraConfig that models of the zoo follow, and those that describe the file alone.
SUPPORTED = frozenset(
    (
        "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "modules_to_save",
        "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
        "fan_in_fan_out", "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path",
        "revision", "inference_mode", "runtime_config", "megatron_core",
    )
)  # fmt: skip
INITIAL_VALUES = (True, "gaussian")


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, set, tuple)) and all(
        isinstance(name, str) for name in cast(list[Any], value)
    )


def _is_expression(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


def _is_pattern(value: Any, is_right: Callable[[Any], bool]) -> bool:
    items = cast(dict[Any, Any], value).items() if isinstance(value, dict) else [(None, None)]
    return all(_is_expression(key) and is_right(entry) for key, entry in items)


# Names of fields -> whether a value is right, and what is. peft takes others, and fails at some later place.
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a whole number of at least 1"),
    "lora_alpha": (_is_factor, "a finite number above 0"),
    "lora_dropout": (lambda value: value == 0 or (_is_factor(value) and value < 1), "at least 0 and below 1"),
    "use_rslora": (lambda value: isinstance(value, bool), "True or False"),
    "rank_pattern": (partial(_is_pattern, is_right=_is_rank), "a dict of regular expressions and ranks of at least 1"),
    "alpha_pattern": (partial(_is_pattern, is_right=_is_factor), "a dict of regular expressions and numbers above 0"),
    "target_modules exclude_modules layers_pattern": (
        lambda value: _are_names(value) or _is_expression(value), "names of modules or one regular expression"
    ),
    "modules_to_save": (_are_names, "a list of names of modules"),
    "layers_to_transform": (
        lambda value: type(value) is int or (
            isinstance(value, list) and all(type(block) is int for block in cast(list[Any], value))
        ),
        "a number or a list of numbers of blocks",
    ),
    "base_model_name_or_path": (lambda value: isinstance(value, str), "a name or a folder"),
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class LinearModule:
    """A module of transformers' model, and the rows of a parameter of the zoo's model that are its weight."""

    name: str
    parameter: ParameterSpec
    rows: tuple[int, int]
    transposed: bool

    @property
    def layer(self) -> str:
        return self.parameter.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """The name of the factors in the layer's adapter."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Lora:
    """What has been added to a model: the attribute `lora` of the model.

    Attributes:
        config: peft's LoraConfig.
        modules: The modules with factors, on all pipeline stages.
        saved: The parameters that are trained besides, whole: name -> names of the tensors that are stored for it.
    """

    config: Any
    modules: tuple[LinearModule, ...]
    saved: Mapping[str, tuple[str, ...]]


def import_peft() -> Any:
    """Returns the module peft. ValueError if it is not installed."""
    try:
        import peft
    except ImportError:
        raise ValueError('LoRA needs the package peft: pip install "shardzoo[lora]"') from None
    return peft


def lora_config(**settings: Any) -> Any:
    """Returns peft's LoraConfig. ValueError for settings that it refuses, or that the zoo's models do not follow."""
    peft = import_peft()
    try:
        config = peft.LoraConfig(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"LoRA: {error}") from None
    plain = peft.LoraConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in SUPPORTED and value != getattr(plain, field.name):
            raise ValueError(
                f"LoRA: models of the zoo do not support {field.name}={value!r}; leave it out, or use transformers' "
                "model in one process"
            )
    if not any(
        config.init_lora_weights is value or config.init_lora_weights == value
        for value in INITIAL_VALUES
    ):
        raise ValueError(
            f"LoRA: init_lora_weights must be True or 'gaussian', not {config.init_lora_weights!r}"
        )
    for names, (is_right, wanted) in CHECKS.items():
        for name in names.split():
            value = getattr(config, name)
            if not is_right(value) and value is not getattr(plain, name):
                raise ValueError(f"LoRA: {name} must be {wanted}, not {reprlib.repr(value)}")
    return config


def add_lora(model: Any, config: Any, seed: int = 1234) -> None:
    """Adds LoRA weights to a model, in place, and freezes all parameters but those and `modules_to_save`.

    The initial values depend on the seed and the parameters' names, and not on how the model is split: A is uniform as
    in peft, B is zero.

    Args:
        model: The model, or a pipeline stage of it.
        config: What `lora_config` returns. Without target modules, they are peft's default for the model type.

    Raises:
        ValueError: The targets do not exist or are no linear layers, or the model has LoRA weights already.
    """
    attach_factors(model, config)
    for prefix, adapter in adapters(model).items():
        initialize(adapter, partial(_fill, config), seed, model.mesh, prefix=f"{prefix}.adapter")


def _fill(config: Any, name: str, full: Tensor, generator: torch.Generator) -> None:
    """Sets initial values as peft does: A is uniform (Kaiming with a = √5) or normal, B is zero."""
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
    chosen = _choose(model, native, config)
    saved = _saved_parameters(native, config.modules_to_save or ())
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name in saved
    by_layer: dict[str, list[LinearModule]] = {}
    for module in chosen:
        by_layer.setdefault(module.layer, []).append(module)
    for path, modules in by_layer.items():
        layer = model.get_submodule(path)
        weight = getattr(layer, modules[0].parameter.name.rpartition(".")[2])
        if weight is not None:  # else the layer is in another pipeline stage
            attach(layer, _adapter(layer, modules, config).to(weight.device))
    model.lora = Lora(config, chosen, saved)


def _adapter(layer: Any, modules: list[LinearModule], config: Any) -> Adapter:
    factors: dict[str, LoraFactors] = {}
    for module in modules:
        shape = cast(tuple[int, int], module.parameter.shape)
        r, alpha = (_pattern_value(patterns, module.name, default) for patterns, default in (
            (config.rank_pattern, config.r), (config.alpha_pattern, config.lora_alpha),
        ))  # fmt: skip
        if r > max(shape):
            raise ValueError(
                f"LoRA: the rank {r} is above both sizes of {module.name}, {shape[0]} x {shape[1]}"
            )
        factors[module.key] = LoraFactors(
            AdaptedRows(shape, module.parameter.shard, *module.rows),
            r,
            alpha / (math.sqrt(r) if config.use_rslora else r),
            config.lora_dropout,
            sequence_parallel=getattr(layer, "sequence_parallel", False),
            mesh=getattr(layer, "mesh", None),
        )
    attributes = [name for name, _ in layer.named_parameters(recurse=False)]
    several = "weight" not in attributes  # a layer with several outputs has a parameter for each
    outputs = (
        [attributes.index(module.parameter.name.rpartition(".")[2]) for module in modules]
        if several
        else ()
    )
    return Adapter(layer, factors, outputs)


def _pattern_value(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Returns the value of a module in peft's `rank_pattern` or `alpha_pattern`."""
    if not patterns:
        return default
    return patterns.get(import_peft().utils.other.get_pattern_key(list(patterns), name), default)


def _modules(native: NativeModel) -> Iterator[LinearModule]:
    """Yields the modules of transformers' model that have a matrix, in the order of the zoo's parameters."""
    for name, entry in native.entries().items():
        spec = native.parameters[name]
        if len(spec.shape) == 2:
            for order, span in enumerate(compute_stacked_ranges(spec, entry)):
                stored = native.to_hf_name(entry.stored_names()[order]).removesuffix(".weight")
                rows = span if spec.dim == 0 else (0, spec.shape[0])
                yield LinearModule(stored, spec, rows, entry.transpose)


def _choose(model: Any, native: NativeModel, config: Any) -> tuple[LinearModule, ...]:
    """Returns the modules that the configuration names, and completes its target_modules.

    Raises ValueError if it names none, or one that is no linear layer.
    """
    peft = import_peft()
    known = list(_modules(native))
    linear = [module for module in known if isinstance(model.get_submodule(module.layer), LINEARS)]
    targets: Any = config.target_modules
    if not targets:
        targets = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(
            native.config.model_type
        )
        if targets is None:
            raise ValueError(
                f"LoRA: peft has no default targets for a {native.config.model_type}; name target_modules, of "
                f"{_listed(linear)}, or 'all-linear'"
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
    if other := [module.name for module in found if module not in linear]:
        raise ValueError(
            f"LoRA: target_modules match {other[0]}, which is no linear layer inside the model; name it in "
            "modules_to_save to train it whole"
        )
    names: str | list[str] = config.target_modules
    parts = [names] if isinstance(names, str) else names
    missing = [name for name in parts if not any(_is_part(name, module.name) for module in linear)]
    if not found or (missing and parts is names):
        raise ValueError(
            f"LoRA: target_modules {(missing or parts)[0]!r} match no linear layer of the model, which has "
            f"{_listed(linear)}"
        )


def _is_part(name: str, module: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _listed(linear: list[LinearModule]) -> str:
    return ", ".join(dict.fromkeys(module.key for module in linear))


def _saved_parameters(native: NativeModel, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns the parameters of the modules of transformers' model whose names end with one of `names`, as in peft.

    Raises ValueError for a name that matches nothing, and for modules that the zoo cannot train alone.
    """
    tied = dict(native.name_map.aliases)
    own = {stored for entry in native.entries().values() for stored in entry.stored_names()}
    shared = {name for pair in tied.items() if pair[0] not in own for name in pair}
    saved: dict[str, tuple[str, ...]] = {}
    matched: set[str] = set()
    for native_name, entry in native.entries().items():
        stored = tuple(map(native.to_hf_name, entry.stored_names()))
        hits = [[name for name in names if _is_inside(module, name)] for module in stored]
        if not any(hits):
            continue
        matched.update(*hits)
        if not all(hits):
            raise ValueError(
                f"LoRA: modules_to_save name a part of {', '.join(stored)}, which are one layer here"
            )
        if both := sorted(shared.intersection(entry.stored_names())):
            raise ValueError(
                f"LoRA: modules_to_save name {both[0]}, which the model shares with its output head or another "
                "embedding, and peft would train only one of them; use a model with weights of their own"
            )
        saved[native_name] = stored
    if unknown := sorted(set(names) - matched):
        tops = ", ".join(
            dict.fromkeys(
                name.rpartition(".")[0] for name in own if ".{" not in name and name.count(".") < 3
            )
        )
        raise ValueError(
            f"LoRA: modules_to_save {unknown[0]!r} matches no module of the model; it has {tops}"
        )
    return saved


def _is_inside(tensor: str, name: str) -> bool:
    """Returns whether a tensor belongs to a module whose name ends with `name`."""
    parts = tensor.split(".")[:-1]
    return any(".".join(parts[: end + 1]).endswith(name) for end in range(len(parts)))


def stored_modules(model: Any, native_names: Collection[str]) -> list[str]:
    """Returns transformers' names of modules of the zoo's model, such as those of a new head."""
    native = NativeModel.from_config(model.config)
    names = [
        native.to_hf_name(stored).rpartition(".")[0]
        for name, entry in native.entries().items()
        if any(name.startswith(f"{own}.") for own in native_names)
        for stored in entry.stored_names()
    ]
    return list(dict.fromkeys(names))


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """Returns the adapters of this rank's layers by the layers' names."""
    modules = cast(Any, model).named_modules()
    return {
        name.removesuffix(".adapter"): module
        for name, module in modules
        if isinstance(module, Adapter)
    }


def peft_names(model: Any) -> dict[str, tuple[str, ...]]:
    """Returns name of a parameter that LoRA trains -> its names in peft's file, on all pipeline stages."""
    lora: Lora = model.lora
    names: dict[str, tuple[str, ...]] = {}
    for module in lora.modules:
        for factor in ("lora_A", "lora_B"):
            names[f"{module.layer}.adapter.{module.key}.{factor}"] = (
                f"{PREFIX}{module.name}.{factor}.weight",
            )
    return names | {
        name: tuple(PREFIX + part for part in stored) for name, stored in lora.saved.items()
    }


@torch.no_grad()
def whole_weights(model: Any) -> dict[str, Tensor]:
    """Returns what LoRA trains, whole and on CPU, under peft's names, on every rank. Collective."""
    native, names = NativeModel.from_config(model.config), peft_names(model)
    entries = native.entries()
    copies, found = find_copied_parameters(model), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        if name in names and name not in copies:
            whole = _gathered(parameter, model.mesh).cpu()
            parts = (
                [whole]
                if name not in entries
                else _parts(whole, native.parameters[name], entries[name])
            )
            found |= dict(zip(names[name], parts, strict=True))
    mesh: ParallelMesh | None = model.mesh
    if mesh is None or mesh.pp_size == 1:
        return found
    order = [part for parts in names.values() for part in parts]
    return _of_all_stages(found, order, mesh, next(model.parameters()).device)


def _of_all_stages(
    found: dict[str, Tensor], names: list[str], mesh: ParallelMesh, device: torch.device
) -> dict[str, Tensor]:
    """Returns the tensors `names`, each of which one pipeline stage has `found`, on every stage. Collective."""
    kinds = torch.zeros(len(names), 3, dtype=torch.int64)  # shape, and place of the type
    for row, name in enumerate(names):
        if name in found:
            shape = found[name].shape
            kinds[row, : len(shape)], kinds[row, 2] = (
                torch.tensor(shape),
                DTYPES.index(found[name].dtype),
            )
    kinds = kinds.to(device)
    cast(Any, dist).all_reduce(kinds, group=mesh.pp_group)
    whole: dict[str, Tensor] = {}
    for name, (rows, columns, number) in zip(
        names, cast(list[list[int]], cast(Any, kinds).tolist()), strict=True
    ):
        own = found.get(
            name, torch.zeros([size for size in (rows, columns) if size], dtype=DTYPES[number])
        )
        bits = own.to(device, copy=True).view(
            torch.uint8
        )  # as whole numbers, which zeros do not change
        cast(Any, dist).all_reduce(bits, group=mesh.pp_group)
        whole[name] = bits.cpu().view(DTYPES[number])
    return whole


def _gathered(parameter: Any, mesh: ParallelMesh | None) -> Tensor:
    """Returns the full, unpadded value of a parameter."""
    shard, size = getattr(parameter, "shard", None), tp_size(mesh)
    if shard is None or (size == 1 and tuple(parameter.shape) == shard.shape):
        return parameter.detach().clone()
    dim, longest = shard.dim, shard.local_shape(0, size)[shard.dim]
    padded = parameter.new_zeros(shard.local_shape(0, size))
    padded.narrow(dim, 0, parameter.shape[dim]).copy_(parameter)
    parts = torch.split(gather_from_tp(padded, mesh, dim), longest, dim)
    lengths = [shard.local_shape(rank, size)[dim] for rank in range(size)]
    return shard.merge(
        [part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)]
    )


def _parts(whole: Tensor, spec: ParameterSpec, entry: NameEntry) -> list[Tensor]:
    """Returns the tensors that are stored for a parameter."""
    spans = compute_stacked_ranges(spec, entry)
    parts = (
        [whole.narrow(spec.dim, start, stop - start) for start, stop in spans]
        if whole.dim()
        else [whole]
    )
    return [(part.t() if entry.transpose else part).contiguous() for part in parts]


def write_adapter_config(folder: Path, config: Any, base: str) -> None:
    """Writes peft's configuration of an adapter of the model `base`."""
    config = copy.copy(config)
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(folder))


def save_adapter(model: Any, folder: str | Path, base: str = "") -> None:
    """Writes the LoRA weights of a model as peft's files, which peft loads into transformers' model. Collective.

    Args:
        folder: A new or existing folder, which the first rank writes.
        base: The name of the base model; by default the folder that the model was loaded from.
    """
    weights = whole_weights(model)
    if not dist.is_initialized() or cast(Any, dist).get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_adapter_config(
            Path(folder), model.lora.config, base or getattr(model, "name_or_path", "") or ""
        )
        write_tensors(Path(folder) / WEIGHTS_FILE, weights)
    if dist.is_initialized():
        cast(Any, dist).barrier()


def folder_digest(folder: Path) -> str:
    """Returns the sha256 of a model on disk: of its manifest, which has those of the tensors, or of its weight files.

    Names of files and their contents count, other files such as the tokenizer's do not.
    """
    manifest = folder / MANIFEST
    files = (
        [manifest]
        if manifest.exists()
        else sorted(p for p in folder.iterdir() if p.suffix in WEIGHT_SUFFIXES)
    )
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{hash_file(path)}\0".encode())
    return digest.hexdigest()


def check_same_lora(model: Any, folder: Path) -> None:
    """Raises ValueError if a folder of peft multiplies the products of its weights by other factors than the model."""
    stored, own = read_adapter_config(folder), model.lora.config
    for name in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
        mine, theirs = getattr(own, name), getattr(stored, name)
        if mine != theirs:
            raise ValueError(
                f"{folder} was trained with {name}={theirs!r}, and cannot go on with {mine!r}"
            )


def read_adapter_config(folder: Path) -> Any:
    """Returns the LoraConfig of a folder that peft or `write_adapter` wrote. ValueError if there is none for LoRA."""
    values = read_json_object(checked_file(folder, CONFIG_FILE))
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{folder / CONFIG_FILE} describes an adapter of type {kind!r}, not LORA")
    known = {field.name for field in fields(import_peft().LoraConfig)}
    for name in values.keys() - known:
        if values[name]:
            raise ValueError(
                f"{folder / CONFIG_FILE} has {name}={values[name]!r}, which this release of peft lacks"
            )
    try:
        return lora_config(**{name: value for name, value in values.items() if name in known})
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from None


def load_adapter(model: Any, folder: str | Path) -> None:
    """Adds the LoRA weights in a folder of peft to a model, in place, and freezes all other parameters.

    Raises ValueError if the folder is damaged or its weights are not those of the model.
    """
    path = Path(folder)
    if not (path / CONFIG_FILE).exists():
        raise ValueError(f"{folder} holds no adapter: it has no {CONFIG_FILE}")
    attach_factors(model, read_adapter_config(path))
    load_weights(model, path)


@torch.no_grad()
def load_weights(model: Any, folder: Path) -> None:
    """Reads the values of what LoRA trains from peft's file."""
    stored, names = _stored_weights(model, folder), peft_names(model)
    entries = NativeModel.from_config(model.config).entries()
    with TensorReader() as reader:
        for name, parameter in model.named_parameters():
            if name in names:
                transposed = name in entries and entries[name].transpose
                _fill_from(
                    reader,
                    [stored[part] for part in names[name]],
                    parameter,
                    model.mesh,
                    transposed,
                )


def _stored_weights(model: Any, folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of peft's file. ValueError unless they are those that the model's configuration names."""
    stored = index_by_name(read_header(checked_file(folder, WEIGHTS_FILE))[0])
    names = peft_names(model)
    wanted = {part for parts in names.values() for part in parts}
    for kind, differing in (("lacks", wanted - stored.keys()), ("has", stored.keys() - wanted)):
        if differing:
            few = ", ".join(sorted(differing)[:3])
            more = ", which the model and the configuration do not name" if kind == "has" else ""
            raise ValueError(f"{folder / WEIGHTS_FILE} {kind} {few}{more}")
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
    if not (folder / CONFIG_FILE).exists():
        raise ValueError(f"{folder} holds no adapter: it has no {CONFIG_FILE}")
    with torch.device("meta"), config_errors():
        model: Any = build_on_meta(native.config, None)
        attach_factors(model, read_adapter_config(folder))
    stored, names, layers = _stored_weights(model, folder), peft_names(model), adapters(model)
    updates: dict[str, tuple[LowRankUpdate, ...]] = {}
    for module in model.lora.modules:
        factors: LoraFactors = getattr(layers[module.layer], module.key)
        pair = [
            stored[names[f"{module.layer}.adapter.{module.key}.{factor}"][0]]
            for factor in ("lora_A", "lora_B")
        ]
        for tensor, parameter in zip(pair, (factors.lora_A, factors.lora_B), strict=True):
            _check_shape(tensor, tuple(parameter.shape))
        update = LowRankUpdate(module.rows, factors.scaling, *pair)
        updates[module.parameter.name] = (*updates.get(module.parameter.name, ()), update)
    entries = native.entries()
    saved = {
        name: _saved_placement(
            native.parameters[name], entries[name], [stored[part] for part in names[name]]
        )
        for name in model.lora.saved
    }
    return StoredAdapter((folder / CONFIG_FILE, folder / WEIGHTS_FILE), updates, saved)


def _check_shape(tensor: StoredTensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ValueError(f"{tensor} has shape {list(tensor.shape)}, but {list(expected)} is needed")


def _saved_placement(
    spec: ParameterSpec, entry: NameEntry, tensors: list[StoredTensor]
) -> ParameterPlacement:
    """Returns where an adapter stores the whole value of a parameter."""
    spans = compute_stacked_ranges(spec, entry)
    for tensor, span in zip(tensors, spans, strict=True):
        _check_shape(tensor, compute_stored_shape(spec, span, entry))
    parts = (
        TensorSlice(t.at_least_1d(), (span,), entry.transpose)
        for t, span in zip(tensors, spans, strict=True)
    )
    return ParameterPlacement(spec.name, spec.shape or (1,), spec.dim, (tuple(parts),))


def _fill_from(
    reader: TensorReader,
    stored: list[StoredTensor],
    parameter: Any,
    mesh: ParallelMesh | None,
    transposed: bool,
) -> None:
    parts = [reader.whole(tensor) for tensor in stored]
    parts = [part.t() if transposed else part for part in parts]
    shard = getattr(parameter, "shard", None)
    expected = tuple(parameter.shape if shard is None else shard.shape)
    if len({part.shape[1:] for part in parts}) == 1 and (len(parts) == 1 or parts[0].dim()):
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 0)
        if tuple(whole.shape) == expected:
            parameter.copy_(
                whole if shard is None else shard.slice(whole, tp_rank(mesh), tp_size(mesh))
            )
            return
    raise ValueError(
        f"{stored[0]} has shape {list(stored[0].shape)}, but {list(expected)} are needed in all"
    )


@torch.no_grad()
def merged_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the values that this rank's adapted weights have with the factors' products added, by name."""
    merged: dict[str, Tensor] = {}
    for path, adapter in adapters(model).items():
        layer = model.get_submodule(path)
        names = [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]
        outputs = adapter.outputs or [0] * len(adapter.factors)
        for number, factors in zip(outputs, adapter.factors, strict=True):
            name = f"{path}.{names[number]}"
            merged[name] = factors.add_to(merged.get(name, layer.get_parameter(names[number])))
    return merged


@torch.no_grad()
def merge_lora(model: Any) -> None:
    """Adds the factors' products to the weights, in place, and removes the factors."""
    for name, value in merged_parameters(model).items():
        model.get_parameter(name).copy_(value)
    for path in adapters(model):
        detach(model.get_submodule(path))
    model.lora = None
