"""Where a source keeps each parameter, by the family's name map and the parameters' `Shard`s."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.overrides import TorchFunctionMode

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.dtypes import torch_name
from ..checkpoint.file_io import open_for_reading, read_into
from ..checkpoint.layout import CheckpointLayout, ParameterPlacement, TensorSlice
from ..checkpoint.manifest import Manifest
from ..checkpoint.stored_tensor import StoredTensor
from ..mpu import Shard
from .auto import config_from_dict, from_config
from .common.config import ModelConfig
from .common.name_map import Entry, NameMap
from .registry import family


@dataclass(frozen=True)
class StoredNames:
    """What a Hugging Face folder calls things, so that a merge gives them their names back.

    by_parameter: native name -> the tensor, or the tensors stacked in it. ties: a tensor that repeats another ->
    that one.
    """

    by_parameter: Mapping[str, tuple[str, ...]]
    ties: Mapping[str, str]

    def copies(self, parameter: str) -> list[tuple[str, ...]]:
        """The parameter's tensors, and then once more for each tensor that repeats one of them."""
        own = self.by_parameter[parameter]
        repeats = [(alias, kept) for alias, kept in self.ties.items() if kept in own]
        return [own, *(tuple(alias if name == kept else name for name in own) for alias, kept in repeats)]


@dataclass(frozen=True)
class MappedCheckpoint:
    """A source together with its model and where that model's parameters lie."""

    source: Checkpoint
    model: NativeModel
    layout: CheckpointLayout
    names: StoredNames
    hashes: Mapping[tuple[Path, str], str]  # (file, tensor) -> sha256, as far as the source records them


def map_checkpoint(source: Checkpoint) -> MappedCheckpoint:
    """ValueError, naming tensor and file, for what is missing, unknown, mis-shaped or stored twice."""
    count = sum(map(len, source.ranks)) + len(source.extras)
    try:
        model = native_model(source.config, most_layers=count, is_tied=lambda _, names: is_tied(source, names))
        mapped = {"huggingface": _map_huggingface, "shards": _map_shards, "legacy": _map_legacy}[source.kind](
            source, model
        )
        mapped.layout.check()
    except ValueError as error:
        raise ValueError(f"{source.folder}: {error}") from None
    return mapped


def entries(model: NativeModel) -> dict[str, Entry]:
    """Native name -> its entry of the family's name map."""
    return {entry.native: entry for entry in model.name_map.resolve(model.parameters)}


def stacked_ranges(parameter: Parameter, entry: Entry) -> list[tuple[int, int]]:
    """The range of the parameter that each of its entry's stored tensors holds."""
    length = parameter.shape[parameter.dim] if parameter.shape else 1
    if len(entry.stored_names()) == 1:
        return [(0, length)]
    groups = parameter.shard.groups if parameter.shard else ()
    if len(groups) != len(entry.stored_names()):
        raise ValueError(f"{parameter.name} has {len(groups)} groups for {', '.join(entry.stored_names())}")
    stops = [sum(groups[: i + 1]) for i in range(len(groups))]
    return list(zip([0, *stops], stops, strict=False))


def stored_shape(parameter: Parameter, span: tuple[int, int], entry: Entry) -> tuple[int, ...]:
    """The shape in which a Hugging Face folder stores `span` of the parameter along its `dim`."""
    shape = list(parameter.shape)
    if shape:
        shape[parameter.dim] = span[1] - span[0]
    return tuple(shape[::-1] if entry.transpose else shape)


def _map_huggingface(source: Checkpoint, model: NativeModel) -> MappedCheckpoint:
    tensors = source.ranks[0]
    match = model.name_map.match(model.parameters, tensors)
    stored = {
        name: tuple(match.sources[today] for today in entry.stored_names()) for name, entry in match.entries.items()
    }
    names = StoredNames(stored, {alias: match.sources[kept] for alias, kept in match.aliases.items()})
    placements, used = {}, set()
    for name, parameter in model.parameters.items():
        entry = match.entries[name]
        spans, copies = stacked_ranges(parameter, entry), []
        for copy in names.copies(name):
            used.update(copy)
            parts = []
            for stored_name, (start, stop) in zip(copy, spans, strict=True):
                tensor = tensors[stored_name]
                expected = stored_shape(parameter, (start, stop), entry)
                if tensor.shape != expected:
                    raise ValueError(f"{tensor} has shape {list(tensor.shape)}, but config.json means {list(expected)}")
                parts.append(TensorSlice(tensor.at_least_1d(), ((start, stop),), entry.transpose))
            copies.append(tuple(parts))
        placements[name] = ParameterPlacement(name, parameter.shape or (1,), parameter.dim, tuple(copies))
    extras = {name: tensor for name, tensor in tensors.items() if name not in used}
    return MappedCheckpoint(source, model, CheckpointLayout(placements, extras), names, {})


def _map_shards(source: Checkpoint, model: NativeModel) -> MappedCheckpoint:
    manifest = source.manifest
    assert manifest is not None  # every source of this kind has one
    _check_manifest(manifest, model)
    layout = CheckpointLayout(
        _by_rank(source, model.parameters, {name: name for name in model.parameters}), source.extras
    )
    for name, placement in layout.placements.items():
        for part in placement.parts():
            if torch_name(part.tensor.dtype) != manifest.tensors[name].dtype:
                wanted = manifest.tensors[name].dtype
                raise ValueError(f"{part.tensor} is {part.tensor.dtype}, but {wanted} in the manifest")
    hashes = {
        (tensors[name].file, name): digest
        for name, record in manifest.tensors.items()
        for tensors, digest in zip(source.ranks, record.sha256, strict=True)
    }
    for name, extra in manifest.extras.items():
        tensor = source.extras[name]
        if (tensor.shape, torch_name(tensor.dtype)) != (extra.shape, extra.dtype):
            raise ValueError(f"{tensor} is {tensor.dtype} {list(tensor.shape)}, unlike the manifest's record")
        hashes[tensor.file, name] = extra.sha256
    known = entries(model)
    stored = {name: manifest.tensors[name].stored or known[name].stored_names() for name in model.parameters}
    for name, names in stored.items():
        if len(names) != len(known[name].stored_names()):
            raise ValueError(f"the manifest stores {name} as {', '.join(names)}")
    if unknown := sorted(set(manifest.ties.values()) - {name for names in stored.values() for name in names}):
        raise ValueError(f"the manifest ties a tensor to {unknown[0]}, which the model does not have")
    return MappedCheckpoint(source, model, layout, StoredNames(stored, manifest.ties), hashes)


def _check_manifest(manifest: Manifest, model: NativeModel) -> None:
    """The manifest must describe the very model that config.json builds."""
    if manifest.model_type != model.config.model_type or manifest.vocab_size != model.vocab_size:
        raise ValueError(
            f"the manifest is of a {manifest.model_type} with {manifest.vocab_size} tokens, config.json of a "
            f"{model.config.model_type} with {model.vocab_size}"
        )
    if differing := sorted(manifest.tensors.keys() ^ model.parameters.keys()):
        raise ValueError(f"the manifest and the model of config.json do not both have {differing[0]}")
    for name, parameter in model.parameters.items():
        record = manifest.tensors[name]
        if record.shape != parameter.shape:
            raise ValueError(f"{name} is {list(record.shape)} in the manifest, {list(parameter.shape)} by config.json")
        mine = asdict(parameter.shard) if parameter.shard else None
        theirs = record.shard and {
            key: tuple(value) if isinstance(value, list) else value for key, value in record.shard.items()
        }
        if mine != theirs:
            raise ValueError(f"{name} is split as {theirs} in the manifest, but as {mine} by this model")


def _map_legacy(source: Checkpoint, model: NativeModel) -> MappedCheckpoint:
    tensors = source.ranks[0]
    if model.parameters.keys() <= tensors.keys():
        names = {name: name for name in model.parameters}
    else:
        match = model.name_map.match(model.parameters, tensors)
        if any(entry.transpose or len(entry.stored_names()) > 1 for entry in match.entries.values()):
            raise ValueError("mp_rank files of this family must hold shardzoo's own names")
        names = {name: match.sources[entry.stored_names()[0]] for name, entry in match.entries.items()}
    if unknown := sorted(tensors.keys() - set(names.values())):
        raise ValueError(f"{tensors[unknown[0]]} is no parameter of the model")
    _check_ranks_differ(source, model, names)
    parameters = {name: parameter.without_padding() for name, parameter in model.parameters.items()}
    padded = {name for name in names if _is_padded(model.parameters[name], source, names[name])}
    parameters |= {name: model.parameters[name] for name in padded}
    stored = {name: entry.stored_names() for name, entry in entries(model).items()}
    return MappedCheckpoint(
        source, model, CheckpointLayout(_by_rank(source, parameters, names)), StoredNames(stored, {}), {}
    )


def _check_ranks_differ(source: Checkpoint, model: NativeModel, names: Mapping[str, str]) -> None:
    """ValueError if two files, which have no hashes, begin alike in every split matrix."""
    split = [names[p.name] for p in model.parameters.values() if p.shard is not None and len(p.shape) > 1]
    seen: dict[tuple[bytes, ...], int] = {}
    for rank, tensors in enumerate(source.ranks):
        beginnings = tuple(beginning(tensors[name], 4096) for name in split)
        if beginnings in seen and any(len(set(content)) > 1 for content in beginnings):
            name = next(iter(tensors.values())).file.name
            raise ValueError(f"{name} repeats rank {seen[beginnings]} in every split matrix: one of the two is wrong")
        seen[beginnings] = rank


def _is_padded(parameter: Parameter, source: Checkpoint, name: str) -> bool:
    """Whether the files pad the vocabulary as this package's layers do."""
    return bool(parameter.shard and parameter.shard.pad_multiple) and source.ranks[0][name].shape == (
        parameter.local_shape(len(source.ranks))
    )


def _by_rank(
    source: Checkpoint, parameters: Mapping[str, Parameter], names: Mapping[str, str]
) -> dict[str, ParameterPlacement]:
    size = len(source.ranks)
    for name, parameter in parameters.items():
        expected = parameter.local_shape(size)
        for rank, tensors in enumerate(source.ranks):
            tensor = tensors[names[name]]
            if tensor.shape != expected:
                raise ValueError(
                    f"{tensor} has shape {list(tensor.shape)}; rank {rank} of {size} holds {list(expected)}"
                )
    return rank_placements(
        parameters, [{name: tensors[names[name]] for name in parameters} for tensors in source.ranks]
    )


def rank_placements(
    parameters: Mapping[str, Parameter], ranks: Sequence[Mapping[str, StoredTensor]]
) -> dict[str, ParameterPlacement]:
    """By native name, from each rank's tensors under native names."""
    size, placements = len(ranks), {}
    for name, parameter in parameters.items():
        parts = [TensorSlice(ranks[rank][name].at_least_1d(), parameter.ranges(rank, size)) for rank in range(size)]
        copies = (tuple(parts),) if parameter.shard else tuple((part,) for part in parts)
        placements[name] = ParameterPlacement(name, parameter.shape or (1,), parameter.dim, copies)
    return placements


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
        name_map = family(config.model_type).name_map
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


COMPARED = 1 << 20  # bytes; equal beginnings are taken for equal tensors, and compared in full while copying


def is_tied(source: Checkpoint, name_map: NameMap) -> bool | None:
    """None for families whose models are always tied, or never.

    A head of its own that is stored next to the embedding is a tied one's copy if both hold the same bytes.
    """
    untied = set(name_map.untied_names())
    if not untied:
        return None
    if source.kind != "huggingface":
        own = {entry.native for entry in name_map.entries if untied & set(entry.stored_names())}
        return not own & source.ranks[0].keys()
    tensors = {name_map.todays_name(name, _known(name_map)): tensor for name, tensor in source.ranks[0].items()}
    stored = [(name, kept) for name, kept in name_map.aliases if name in untied and name in tensors]
    if not stored:
        return source.config.get("tie_word_embeddings") is not False
    return all(kept not in tensors or _begin_equal(tensors[name], tensors[kept]) for name, kept in stored)


def _known(name_map: NameMap) -> set[str]:
    return {name for entry in name_map.entries for name in entry.stored_names()}


def _begin_equal(first: StoredTensor, second: StoredTensor) -> bool:
    return (first.shape, first.dtype) == (second.shape, second.dtype) and beginning(first) == beginning(second)


def beginning(tensor: StoredTensor, most: int = COMPARED) -> bytes:
    """The tensor's first bytes."""
    descriptor = open_for_reading(tensor.file)
    try:
        content = np.empty(min(tensor.nbytes, most), np.uint8)
        read_into(tensor, descriptor, 0, content)
    finally:
        os.close(descriptor)
    return content.tobytes()
