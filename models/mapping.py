"""Finds each parameter of a model in a checkpoint, by the family's name map and the parameters' `Shard`s.

`from_pretrained` and the converter share this code, so both accept the same folders and find the same tensors in them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.dtypes import FLOATS, torch_name
from ..checkpoint.file_io import open_for_reading, read_bytes
from ..checkpoint.folder_files import STATE
from ..checkpoint.formats.megatron import SavedRun
from ..checkpoint.layout import (
    CheckpointLayout,
    ParameterPlacement,
    ParameterSpec,
    TensorSlice,
    place_by_rank,
    slice_tensor,
)
from ..checkpoint.manifest import Manifest
from ..checkpoint.stored_tensor import StoredTensor, list_chunks
from ..checkpoint.tensor_reader import TensorReader
from .auto import build_on_meta, config_from_dict, infer_config
from .config import ModelConfig
from .megatron import EMBEDDING, TIED_HEAD, MegatronMap
from .name_map import Entry, NameMap, refuse_names
from .registry import FAMILIES, family

CHUNK = 1 << 20
MOST_PROBLEMS = 20  # that one error message lists


@dataclass(frozen=True)
class NativeModel:
    """The parameters of a model of the zoo, without their values."""

    config: ModelConfig
    name_map: NameMap
    parameters: Mapping[str, ParameterSpec]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def entries(self) -> dict[str, Entry]:
        """Returns native name -> its entry in the family's name map."""
        return {entry.native: entry for entry in self.name_map.resolve(self.parameters)}

    def spell(self, stored_name: str) -> str:
        """Returns the name that transformers' class of this architecture has for the tensor of an entry."""
        return self.name_map.spell(stored_name, self.config.architecture)

    def module_name(self, stored_name: str) -> str:
        """Returns the name that the tensor of an entry has in transformers' module of this architecture."""
        return self.name_map.module_name(stored_name, self.config.architecture)

    def module_names(self) -> StoredNames:
        """Returns the name of each parameter's tensors in the state dictionary of transformers' module."""
        entries = self.entries().items()
        return StoredNames(
            {name: tuple(map(self.module_name, entry.stored_names())) for name, entry in entries},
            {},
        )

    def first_names(self) -> StoredNames:
        """Returns the name of each parameter's tensors in `named_parameters` of transformers' module."""
        names, swapped = self.module_names(), dict[str, str]()
        if re.fullmatch(self.name_map.head_first, self.config.architecture):
            body = self.name_map.prefix
            swapped = {
                kept: alias for alias, kept in self.name_map.aliases if kept.startswith(body)
            }
        own = names.by_parameter.items()
        return StoredNames(
            {name: tuple(swapped.get(s, s) for s in stored) for name, stored in own}, {}
        )

    def new_names(self) -> dict[str, tuple[str, ...]]:
        """Returns native name -> names of its tensors in a new Hugging Face folder."""
        return {
            name: tuple(map(self.spell, entry.stored_names()))
            for name, entry in self.entries().items()
        }

    def padded_vocab_size(self, size: int) -> int:
        """Returns the rows of the vocabulary over all of `size` ranks, padding included."""
        for parameter in self.parameters.values():
            if parameter.shard is not None and parameter.shard.pad_multiple:
                return size * parameter.local_shape(0, size)[parameter.dim]
        return self.vocab_size

    def check_size(self, size: int) -> None:
        """Raises ValueError if a parameter cannot be split over `size` ranks."""
        if size < 1:
            raise ValueError(f"the tensor-parallel size must be at least 1, not {size}")
        for parameter in self.parameters.values():
            parameter.local_shape(0, size)


@dataclass(frozen=True)
class StoredNames:
    """The names of the tensors in a Hugging Face folder, which a merge restores."""

    by_parameter: Mapping[
        str, tuple[str, ...]
    ]  # native name -> names of the tensors that are stacked in the parameter
    ties: Mapping[
        str, str
    ]  # name of a tensor that repeats another one -> name of that other tensor

    def copies(self, parameter: str) -> list[tuple[str, ...]]:
        """Returns the names of the parameter's tensors, and once more for each tensor that repeats one of them."""
        own = self.by_parameter[parameter]
        repeats = [(alias, kept) for alias, kept in self.ties.items() if kept in own]
        return [
            own,
            *(tuple(alias if name == kept else name for name in own) for alias, kept in repeats),
        ]


@dataclass(frozen=True)
class MappedCheckpoint:
    """A checkpoint, its model, and where the checkpoint stores the model's parameters.

    `digests` is (file, tensor name) -> sha256, for the tensors whose digest the checkpoint records.
    """

    checkpoint: Checkpoint
    model: NativeModel
    layout: CheckpointLayout
    names: StoredNames
    digests: Mapping[tuple[Path, str], str]


def parameter_specs(model: nn.Module) -> dict[str, ParameterSpec]:
    """Returns the full shape without padding and the `Shard` of each parameter."""
    specs: dict[str, ParameterSpec] = {}
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "shard", None)
        specs[name] = ParameterSpec(name, tuple(shard.shape if shard else parameter.shape), shard)
    return specs


def native_model(config: ModelConfig, model: nn.Module | None = None) -> NativeModel:
    """Returns the parameters of `model`, or of a model that is built without storage."""
    if model is None:
        with _SkipInitialization(), config_errors():
            model = build_on_meta(config, None)
    return NativeModel(config, family(config.model_type).name_map, parameter_specs(model))


def map_checkpoint(
    checkpoint: Checkpoint, model: NativeModel | None = None, absent: Collection[str] = ()
) -> MappedCheckpoint:
    """Finds every parameter of a model in a checkpoint.

    Args:
        checkpoint: An opened folder.
        model: The parameters to find; by default those of the folder's own configuration.
        absent: Names of parameters to ignore in the model and in the files.

    Raises:
        ValueError: A tensor is missing, is unknown, has a wrong shape or a type that is not floating-point, or is
            stored twice.
    """
    try:
        if model is None:
            model = native_model(stored_config(checkpoint))
        wanted = {
            name: parameter for name, parameter in model.parameters.items() if name not in absent
        }
        finder = {
            "huggingface": _map_huggingface, "shards": _map_shards, "legacy": _map_legacy, "megatron": _map_megatron,
            "dcp": _map_huggingface,
        }[checkpoint.kind]  # fmt: skip
        mapped = finder(checkpoint, NativeModel(model.config, model.name_map, wanted), absent)
        _check_types(mapped.layout)
        mapped.layout.check()
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: {error}") from None
    return mapped


def stored_config(
    checkpoint: Checkpoint,
    config: ModelConfig | None = None,
    repeats: Callable[[StoredTensor, StoredTensor], bool] | None = None,
) -> ModelConfig:
    """Returns the configuration of a checkpoint's model; the files decide whether its output head is tied.

    Args:
        checkpoint: An opened folder.
        config: Used instead of the folder's `config.json`.
        repeats: Returns whether a stored output head repeats the stored embedding; by default it compares their bytes.

    Raises:
        ValueError: There is no configuration, it is invalid, or it has more layers than the files have tensors.
    """
    values: Mapping[str, Any] = {}
    if config is None and checkpoint.config is not None:
        values = checkpoint.config
        try:
            with config_errors():
                config = config_from_dict(dict(values))
        except ValueError as error:
            raise ValueError(f"config.json: {str(error).removeprefix('config.json: ')}") from None
    elif config is None:
        if checkpoint.kind not in ("legacy", "megatron"):
            raise ValueError("there is no config.json; name one with --config")
        config = infer_config(checkpoint.ranks, checkpoint.saved)
    most = sum(1 for _ in checkpoint.tensors())
    layers = getattr(config, config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    layers += getattr(config, "decoder_layers", 0)
    if not 0 < layers <= most:
        raise ValueError(
            f"config.json: it claims {layers:,} layers, but the files have {most:,} tensors in all"
        )
    config = config.fitted_to(checkpoint.ranks[0].keys())
    tied = _is_tied(checkpoint, config, values, repeats or have_same_bytes)
    return config if tied is None else config.with_changes(tie_word_embeddings=tied)


@contextmanager
def config_errors() -> Generator[None, None, None]:
    """Turns any error that a wrong value in config.json causes into a ValueError that names the file."""
    try:
        yield
    except ValueError:
        raise
    except (
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise ValueError(f"config.json: {error}") from None


def stacked_ranges(parameter: ParameterSpec, entry: Entry) -> list[tuple[int, int]]:
    """Returns the range along the parameter's `dim` that each stored tensor of its entry holds."""
    length = parameter.shape[parameter.dim] if parameter.shape else 1
    if len(entry.stored_names()) == 1:
        return [(0, length)]
    groups = parameter.shard.groups if parameter.shard else ()
    if len(groups) != len(entry.stored_names()):
        raise ValueError(
            f"{parameter.name} has {len(groups)} groups for {', '.join(entry.stored_names())}"
        )
    stops = [sum(groups[: i + 1]) for i in range(len(groups))]
    return list(zip([0, *stops], stops, strict=False))


def stored_shape(parameter: ParameterSpec, span: tuple[int, int], entry: Entry) -> tuple[int, ...]:
    """Returns the shape in which a Hugging Face folder stores `span` of the parameter along its `dim`."""
    shape = list(parameter.shape)
    if shape:
        shape[parameter.dim] = span[1] - span[0]
    return tuple(shape[::-1] if entry.transpose else shape)


def have_same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Returns whether two stored tensors are equal bit for bit; reading stops at the first difference."""
    starts = [
        [(start, chunk.shape, chunk.dtype) for start, chunk in list_chunks(tensor)]
        for tensor in (first, second)
    ]
    if starts[0] != starts[1]:
        return False
    return all(
        _bytes_of(mine, start, CHUNK) == _bytes_of(other, start, CHUNK)
        for (_, mine), (_, other) in zip(list_chunks(first), list_chunks(second), strict=True)
        for start in range(0, mine.nbytes, CHUNK)
    )


def _bytes_of(tensor: StoredTensor, start: int, count: int) -> bytes:
    descriptor = open_for_reading(tensor.file)
    try:
        return read_bytes(tensor, descriptor, start, min(count, tensor.nbytes - start))
    finally:
        os.close(descriptor)


def _is_tied(
    checkpoint: Checkpoint,
    config: ModelConfig,
    values: Mapping[str, Any],
    repeats: Callable[[StoredTensor, StoredTensor], bool],
) -> bool | None:
    """Returns whether the output head is tied to the word embedding.

    The files decide, not the flag in config.json, which some programs always set (see `models.t5.config`). A head that
    is stored next to the embedding is a copy of a tied one if both have the same bytes. If the embedding is not stored,
    the configuration decides, because the file of a tied model may use either name. Returns None for families whose
    models are always tied, or never.
    """
    name_map = family(config.model_type).name_map
    untied = set(name_map.untied_names())
    if not untied:
        return None
    if checkpoint.saved is not None:
        return _is_tied_in_megatron(checkpoint, checkpoint.saved, config, repeats)
    if checkpoint.kind not in ("huggingface", "dcp"):
        return (
            not {entry.native for entry in name_map.untied_entries()} & checkpoint.ranks[0].keys()
        )
    known = name_map.stored_names()
    tensors = {
        name_map.todays_name(name, known): tensor for name, tensor in checkpoint.ranks[0].items()
    }
    heads = [(name, kept) for name, kept in name_map.aliases if name in untied and name in tensors]
    if not heads:
        return values.get("tie_word_embeddings") is not False
    for head, kept in heads:
        others = [
            kept,
            *(name for name, same in name_map.aliases if same == kept and name not in untied),
        ]
        stored = next((tensors[name] for name in others if name in tensors), None)
        if not (
            getattr(config, "tie_word_embeddings", True)
            if stored is None
            else repeats(tensors[head], stored)
        ):
            return False
    return True


def _is_tied_in_megatron(
    checkpoint: Checkpoint,
    saved: SavedRun,
    config: ModelConfig,
    repeats: Callable[[StoredTensor, StoredTensor], bool],
) -> bool:
    """Returns whether the head is tied: the arguments decide, or else whether the last stage repeats the embedding."""
    names, tensors = megatron_map(config).spell(checkpoint.ranks[0]), checkpoint.ranks[0]
    if TIED_HEAD not in names:
        return True
    untied = saved.arguments.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        return not untied
    return EMBEDDING in names and repeats(tensors[names[TIED_HEAD]], tensors[names[EMBEDDING]])


def megatron_map(config: ModelConfig) -> MegatronMap:
    """Returns how Megatron-LM stores models of a configuration's family. ValueError if it does not have the family."""
    found = family(config.model_type).megatron
    if found is None:
        having = ", ".join(name for name in FAMILIES if family(name).megatron is not None)
        raise ValueError(
            f"Megatron-LM has no {config.model_type} that equals transformers'; it has {having}"
        )
    return found


def _check_types(layout: CheckpointLayout) -> None:
    for name, placement in layout.placements.items():
        for part in placement.slices():
            if part.tensor.dtype not in FLOATS:
                kind = torch_name(part.tensor.dtype)
                raise ValueError(
                    f"{part.tensor} has type {kind}, but {name} must have a floating-point type"
                )


def _map_huggingface(
    checkpoint: Checkpoint, model: NativeModel, absent: Collection[str]
) -> MappedCheckpoint:
    tensors = checkpoint.ranks[0]
    untied = getattr(model.config, "tie_word_embeddings", True) is False
    match = model.name_map.match(model.parameters, tensors, untied=untied)
    stored = {
        name: tuple(match.sources[today] for today in entry.stored_names())
        for name, entry in match.entries.items()
    }
    ties = {
        alias: match.sources[kept] for alias, kept in match.aliases.items() if kept in match.sources
    }
    is_dcp = checkpoint.kind == "dcp"
    same = {
        alias
        for alias, kept in ties.items()
        if is_dcp and _places(tensors[alias]) == _places(tensors[kept])
    }
    names = StoredNames(stored, {alias: kept for alias, kept in ties.items() if alias not in same})
    placements: dict[str, ParameterPlacement] = {}
    used = set(same)
    problems: list[str] = []
    for name, parameter in model.parameters.items():
        entry = match.entries[name]
        spans = stacked_ranges(parameter, entry)
        copies: list[tuple[TensorSlice, ...]] = []
        for copy in names.copies(name):
            used.update(copy)
            for stored_name, span in zip(copy, spans, strict=True):
                _check_shape(
                    tensors[stored_name], stored_shape(parameter, span, entry), name, problems
                )
            parts = zip(copy, spans, strict=True)
            found = (
                slice_tensor(tensors[part], (span,), parameter.dim, entry.transpose)
                for part, span in parts
            )
            copies.append(tuple(chain.from_iterable(found)))
        placements[name] = ParameterPlacement(
            name, parameter.shape or (1,), parameter.dim, tuple(copies)
        )
    _refuse_shapes(problems)
    extras = {name: tensor for name, tensor in tensors.items() if name not in used}
    return MappedCheckpoint(checkpoint, model, CheckpointLayout(placements, extras), names, {})


def _places(tensor: StoredTensor) -> list[tuple[Path, int]]:
    """Returns where the bytes of a tensor are; a DCP folder can have two names for the same."""
    return [(chunk.file, chunk.offset) for _, chunk in list_chunks(tensor)]


def _check_shape(
    tensor: StoredTensor, expected: tuple[int, ...], name: str, problems: list[str]
) -> None:
    if tensor.shape != expected:
        problems.append(
            f"{tensor} has shape {list(tensor.shape)}, but {name} needs {list(expected)} according to config.json"
        )


def _refuse_shapes(problems: list[str]) -> None:
    if problems:
        more = (
            f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        )
        raise ValueError("; ".join(problems[:MOST_PROBLEMS]) + more)


def _map_shards(
    checkpoint: Checkpoint, model: NativeModel, absent: Collection[str]
) -> MappedCheckpoint:
    manifest = checkpoint.manifest
    assert manifest is not None  # every checkpoint of this kind has one
    _check_manifest(manifest, model, absent)
    extras = checkpoint.extras
    layout = CheckpointLayout(
        _by_rank(checkpoint, model.parameters, {name: name for name in model.parameters}), extras
    )
    for name, placement in layout.placements.items():
        for part in placement.slices():
            if torch_name(part.tensor.dtype) != manifest.tensors[name].dtype:
                wanted = manifest.tensors[name].dtype
                raise ValueError(
                    f"{part.tensor} has type {part.tensor.dtype}, but {wanted} in the manifest"
                )
    differing = {
        name: _first_of_close(checkpoint.folder, placement)
        for name, placement in layout.placements.items()
        if len(placement.copies) > 1 and len(set(manifest.tensors[name].sha256)) > 1
    }
    layout = CheckpointLayout({**layout.placements, **differing}, extras)
    digests = {
        (tensors[name].file, name): digest
        for name, record in manifest.tensors.items()
        for tensors, digest in zip(checkpoint.ranks, record.sha256, strict=True)
    }
    for name, extra in manifest.extras.items():
        tensor = extras[name]
        if (tensor.shape, torch_name(tensor.dtype)) != (extra.shape, extra.dtype):
            mine, recorded = (
                f"{tensor.dtype} {list(tensor.shape)}",
                f"{extra.dtype} {list(extra.shape)}",
            )
            raise ValueError(f"{tensor} is {mine}, but {recorded} in the manifest")
        digests[tensor.file, name] = extra.sha256
    return MappedCheckpoint(checkpoint, model, layout, _names_in_manifest(manifest, model), digests)


def _first_of_close(folder: Path, placement: ParameterPlacement) -> ParameterPlacement:
    """Returns the placement without the copies after the first one, which in a run may differ from it by rounding.

    There, each tensor-parallel rank updates its own copy of a replicated parameter. If the ranks' parts are unequal,
    ZeRO's flat buffers have it at different places, and a loop over vectors rounds the last elements in another way.
    Raises ValueError if the copies differ by more, or are not those of a run.
    """
    if not (folder / STATE).exists():
        name, count = placement.name, len(placement.copies)
        raise ValueError(
            f"{folder}: tensor {name} must be the same on all {count} ranks, but its hashes differ"
        )
    with TensorReader() as reader:
        first, *others = [reader.whole(copy[0].tensor).double() for copy in placement.copies]
    relative = 2.0**-6 if torch_name(placement.dtype) in ("bfloat16", "float16") else 1e-4
    for number, other in enumerate(others, 1):
        if not torch.allclose(
            first, other, rtol=relative, atol=relative * float(first.abs().max())
        ):
            raise ValueError(
                f"{placement.copies[number][0].tensor} differs from {placement.copies[0][0].tensor} by "
                f"{float((first - other).abs().max()):.2g}; copies of a parameter may differ by rounding only"
            )
    return replace(placement, copies=placement.copies[:1])


def _names_in_manifest(manifest: Manifest, model: NativeModel) -> StoredNames:
    known = model.new_names()
    stored = {name: manifest.tensors[name].stored or known[name] for name in model.parameters}
    for name, names in stored.items():
        if len(names) != len(known[name]):
            mine, needed = ", ".join(names), len(known[name])
            raise ValueError(
                f"the manifest stores {name} as {mine}, but this model needs {needed} names for it"
            )
    if unknown := sorted(
        set(manifest.ties.values()) - {name for names in stored.values() for name in names}
    ):
        raise ValueError(
            f"the manifest ties a tensor to {unknown[0]}, which the model does not have"
        )
    return StoredNames(stored, manifest.ties)


def _check_manifest(manifest: Manifest, model: NativeModel, absent: Collection[str]) -> None:
    """Raises ValueError unless the manifest describes the same model as config.json."""
    if manifest.model_type != model.config.model_type or manifest.vocab_size != model.vocab_size:
        raise ValueError(
            f"the manifest describes a {manifest.model_type} with {manifest.vocab_size} tokens, but config.json a "
            f"{model.config.model_type} with {model.vocab_size}"
        )
    stored = {name for name in manifest.tensors if name not in absent}
    refuse_names(sorted(model.parameters.keys() - stored), sorted(stored - model.parameters.keys()))
    for name, parameter in model.parameters.items():
        record = manifest.tensors[name]
        if record.shape != parameter.shape:
            found, needed = list(record.shape), list(parameter.shape)
            raise ValueError(
                f"{name} has shape {found} in the manifest, but {needed} according to config.json"
            )
        mine = parameter.shard.to_record() if parameter.shard else None
        if mine != record.shard:
            raise ValueError(
                f"{name} is split as {record.shard} in the manifest, but as {mine} in this model"
            )


def _map_legacy(
    checkpoint: Checkpoint, model: NativeModel, absent: Collection[str]
) -> MappedCheckpoint:
    if absent:
        raise ValueError(
            f"new modules cannot be added to {checkpoint.description}; split or merge the folder first"
        )
    tensors = checkpoint.ranks[0]
    if model.parameters.keys() <= tensors.keys():
        names = {name: name for name in model.parameters}
    else:
        match = model.name_map.match(model.parameters, tensors)
        if any(
            entry.transpose or len(entry.stored_names()) > 1 for entry in match.entries.values()
        ):
            raise ValueError(
                "mp_rank files of this family must have shardzoo's native names for the tensors"
            )
        names = {
            name: match.sources[entry.stored_names()[0]] for name, entry in match.entries.items()
        }
    if unknown := sorted(tensors.keys() - set(names.values())):
        raise ValueError(f"{tensors[unknown[0]]} is not a parameter of the model")
    parameters = {name: parameter.without_padding() for name, parameter in model.parameters.items()}
    padded = {name for name in names if _is_padded(model.parameters[name], checkpoint, names[name])}
    parameters |= {name: model.parameters[name] for name in padded}
    placements = _by_rank(checkpoint, parameters, names)
    _check_ranks_differ(checkpoint, model, names)
    return MappedCheckpoint(
        checkpoint, model, CheckpointLayout(placements), StoredNames(model.new_names(), {}), {}
    )


def _map_megatron(
    checkpoint: Checkpoint, model: NativeModel, absent: Collection[str]
) -> MappedCheckpoint:
    if absent:
        raise ValueError(
            f"new modules cannot be added to a {checkpoint.description}; split or merge the folder first"
        )
    saved, ranks, found = checkpoint.saved, checkpoint.ranks, megatron_map(model.config)
    assert saved is not None  # every checkpoint of this kind has it
    found.check(saved.arguments, ranks[0])
    heads = saved.arguments.get("num_attention_heads")
    if isinstance(heads, int) and heads != model.config.attention_heads:
        raise ValueError(
            f"config.json has {model.config.attention_heads} attention heads, but its arguments {heads}"
        )
    spelled = found.spell(ranks[0])
    match = found.match(model.parameters, spelled)
    names = {
        name: spelled[match.sources[entry.stored_names()[0]]]
        for name, entry in match.entries.items()
    }
    specs = {
        name: found.stored_spec(
            parameter, saved.row_order, (ranks[0][names[name]].shape or (1,))[0]
        )
        for name, parameter in model.parameters.items()
    }
    placements = _by_rank(checkpoint, specs, names)
    for alias, kept in match.aliases.items():  # the last pipeline stage has a copy of the embedding
        native = next(
            name for name, entry in match.entries.items() if entry.stored_names() == (kept,)
        )
        again = _by_rank(checkpoint, {native: specs[native]}, {native: spelled[alias]})[native]
        placements[native] = replace(
            placements[native], copies=placements[native].copies + again.copies
        )
    _check_ranks_differ(checkpoint, model, names)
    return MappedCheckpoint(
        checkpoint, model, CheckpointLayout(placements), StoredNames(model.new_names(), {}), {}
    )


def _check_ranks_differ(
    checkpoint: Checkpoint, model: NativeModel, names: Mapping[str, str]
) -> None:
    """Raises ValueError if two rank files, which record no digests, have the same first bytes in every split matrix."""
    if len(checkpoint.ranks) == 1:
        return
    split = [
        names[p.name] for p in model.parameters.values() if p.shard is not None and len(p.shape) > 1
    ]
    seen: dict[tuple[bytes, ...], int] = {}
    for rank, tensors in enumerate(checkpoint.ranks):
        beginnings = tuple(_bytes_of(tensors[name], 0, 4096) for name in split)
        if beginnings in seen and any(len(set(content)) > 1 for content in beginnings):
            name = next(iter(tensors.values())).file.name
            raise ValueError(
                f"{name} repeats rank {seen[beginnings]} in every split matrix: one of the two is wrong"
            )
        seen[beginnings] = rank


def _is_padded(parameter: ParameterSpec, checkpoint: Checkpoint, name: str) -> bool:
    """Returns whether the files pad the vocabulary as this package's layers do."""
    return bool(parameter.shard and parameter.shard.pad_multiple) and checkpoint.ranks[0][
        name
    ].shape == (parameter.local_shape(0, len(checkpoint.ranks)))


def _by_rank(
    checkpoint: Checkpoint, parameters: Mapping[str, ParameterSpec], names: Mapping[str, str]
) -> dict[str, ParameterPlacement]:
    problems: list[str] = []
    size, is_even = len(checkpoint.ranks), checkpoint.kind != "shards"
    for name, parameter in parameters.items():
        for rank, tensors in enumerate(checkpoint.ranks):
            expected = parameter.even_shape(size) if is_even else parameter.local_shape(rank, size)
            _check_shape(tensors[names[name]], expected, name, problems)
    _refuse_shapes(problems)
    return place_by_rank(
        parameters,
        [{name: tensors[names[name]] for name in parameters} for tensors in checkpoint.ranks],
    )


class _SkipInitialization(TorchFunctionMode):
    """Skips `torch.nn.init`: on parameters without storage it does nothing but import half of torch's compiler."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return function(*args, **(kwargs or {}))
