"""Finds each parameter of a model in a checkpoint, by the family's name map and the parameters'
`Shard`s.

`from_pretrained` and the converter share this code, so both accept the same folders and find the
same tensors in them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.dtypes import FLOATS, torch_name
from ..checkpoint.file_io import read_bytes
from ..checkpoint.folder_files import STATE
from ..checkpoint.formats.megatron import SavedRun, find_repeated
from ..checkpoint.layout import (
    CheckpointLayout,
    ParameterPlacement,
    ParameterSpec,
    TensorSlice,
    place_by_rank,
    slice_experts,
    slice_tensor,
)
from ..checkpoint.manifest import Manifest
from ..checkpoint.stored_tensor import StoredTensor, WidenedTensor, list_chunks
from ..checkpoint.tensor_reader import TensorReader
from ..files.working_copies import close_file, open_for_reading
from .auto import build_on_meta, config_from_dict, infer_config
from .config import ModelConfig
from .family_table import family, list_families
from .megatron import EMBEDDING, TIED_HEAD, UNTIED, MegatronMap, join_experts, part_experts
from .name_map import Match, NameEntry, NameMap, refuse_names
from .quantization import refuse_quantized

CHUNK = 1 << 20  # bytes that two tensors are compared by at a time
HEAD_BYTES = 4096  # bytes at the beginning of a tensor that tell two rank files apart
LOGITS_BIAS = "final_logits_bias"  # BART's, which nearly always is zero
MOST_PROBLEMS = 20  # that one error message lists


@dataclass(frozen=True)
class NativeModel:
    """The parameters of a model of the zoo, without their values."""

    config: ModelConfig
    name_map: NameMap
    parameters: Mapping[str, ParameterSpec]

    @classmethod
    def from_config(cls, config: ModelConfig, model: nn.Module | None = None) -> NativeModel:
        """Describes the parameters of `model`, or of a model that is built without storage."""
        if model is None:
            with _SkipInitialization(), config_errors():
                model = build_on_meta(config, None)
        name_map = family(config.model_type).find_names(config)
        return cls(config, name_map, collect_parameter_specs(model))

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def entries(self) -> dict[str, NameEntry]:
        """Returns native name -> its entry in the family's name map."""
        return {entry.native: entry for entry in self.name_map.resolve(self.parameters)}

    def to_hf_name(self, stored_name: str) -> str:
        """Returns the name that transformers' class of this architecture has for an entry's
        tensor.
        """
        return self.name_map.to_hf_name(stored_name, self.config.architecture)

    def to_module_name(self, stored_name: str) -> str:
        """Returns the name of an entry's tensor in transformers' module of this architecture."""
        return self.name_map.to_module_name(stored_name, self.config.architecture)

    def list_hf_names(self) -> dict[str, tuple[str, ...]]:
        """Returns native name -> names of its tensors in a new Hugging Face folder."""
        names: dict[str, tuple[str, ...]] = {}
        for name, entry in self.entries().items():
            names[name] = tuple(self.to_hf_name(stored) for stored in entry.stored_names())
        return names

    def list_module_names(self) -> StoredNames:
        """Returns the names of each parameter's tensors in the state dict of transformers'
        module.
        """
        names: dict[str, tuple[str, ...]] = {}
        for name, entry in self.entries().items():
            names[name] = tuple(self.to_module_name(stored) for stored in entry.stored_names())
        return StoredNames(names, {})

    def list_first_module_names(self) -> StoredNames:
        """Returns the names of each parameter's tensors in `named_parameters` of transformers'
        module.

        A tied tensor appears there once, under the name of the module that was created first.
        """
        names = self.list_module_names()
        if not re.fullmatch(self.name_map.head_first, self.config.architecture):
            return names
        # The head is created before the body, so that the head's alias comes first.
        first_names: dict[str, str] = {}
        for alias, kept in self.name_map.aliases:
            if kept.startswith(self.name_map.prefix):
                first_names[kept] = alias
        swapped: dict[str, tuple[str, ...]] = {}
        for name, stored_names in names.by_parameter.items():
            swapped[name] = tuple(first_names.get(stored, stored) for stored in stored_names)
        return StoredNames(swapped, {})

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
    """The names of the tensors in a Hugging Face folder, which a merge restores.

    Attributes:
        by_parameter: Native name -> names of the tensors that are stacked in the parameter.
        ties: Name of a tensor that repeats another one -> name of that other tensor.
    """

    by_parameter: Mapping[str, tuple[str, ...]]
    ties: Mapping[str, str]

    def list_copies(self, parameter: str) -> list[tuple[str, ...]]:
        """Returns the names of a parameter's tensors, and again for each tensor that repeats
        one.
        """
        names = self.by_parameter[parameter]
        copies = [names]
        for alias, kept in self.ties.items():
            if kept in names:
                copies.append(tuple(alias if name == kept else name for name in names))
        return copies


@dataclass(frozen=True)
class MappedCheckpoint:
    """A checkpoint, its model, and where the checkpoint stores the model's parameters.

    Attributes:
        digests: (file, tensor name) -> sha256, for the tensors whose digest the checkpoint records.
    """

    checkpoint: Checkpoint
    model: NativeModel
    layout: CheckpointLayout
    names: StoredNames
    digests: Mapping[tuple[Path, str], str]


def collect_parameter_specs(model: nn.Module) -> dict[str, ParameterSpec]:
    """Returns the full shape without padding and the `Shard` of each parameter."""
    specs: dict[str, ParameterSpec] = {}
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "shard", None)
        shape = parameter.shape if shard is None else shard.shape
        keeps_fp32 = getattr(parameter, "keeps_fp32", False)
        specs[name] = ParameterSpec(name, tuple(shape), shard, keeps_fp32=keeps_fp32)
    return specs


def map_checkpoint(
    checkpoint: Checkpoint, model: NativeModel | None = None, absent: Collection[str] = ()
) -> MappedCheckpoint:
    """Finds every parameter of a model in a checkpoint.

    Args:
        checkpoint: An opened folder.
        model: The parameters to find; by default those of the folder's own configuration.
        absent: Names of parameters to ignore in the model and in the files.

    Raises:
        ValueError: A tensor is missing, is unknown, has a wrong shape or a type that is not
            floating-point, or is stored twice.
    """
    mappers = {
        "huggingface": _map_huggingface,
        "dcp": _map_huggingface,
        "shards": _map_shards,
        "legacy": _map_legacy,
        "megatron": _map_megatron,
    }
    refuse_quantized(checkpoint)
    try:
        if model is None:
            model = NativeModel.from_config(read_model_config(checkpoint))
        wanted = {
            name: parameter for name, parameter in model.parameters.items() if name not in absent
        }
        model = replace(model, parameters=wanted)
        mapped = mappers[checkpoint.kind](checkpoint, model, absent)
        _check_dtypes(mapped.layout)
        mapped.layout.check()
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: {error}") from None
    return mapped


def read_model_config(
    checkpoint: Checkpoint,
    config: ModelConfig | None = None,
    is_same: Callable[[StoredTensor, StoredTensor], bool] | None = None,
    architecture: str = "",
    change: Callable[[ModelConfig], ModelConfig] | None = None,
) -> ModelConfig:
    """Returns the configuration of a checkpoint's model; the files decide whether its head is tied.

    Args:
        checkpoint: An opened folder.
        config: Used instead of the folder's `config.json`.
        is_same: Returns whether a stored output head repeats the stored embedding; by default it
            compares their bytes.
        architecture: Used instead of the architecture that the configuration names. If it is
            another one, the model has all parts of that one, whatever the files store.
        change: Changes the configuration.

    Raises:
        ValueError: There is no configuration, it is invalid, or it has more layers than the files
            have tensors.
    """
    refuse_quantized(checkpoint)
    values: Mapping[str, Any] = {}
    fits_files = True
    if config is None and checkpoint.config is not None:
        values = checkpoint.config
        if architecture:
            fits_files = read_architecture(values) == architecture
            values = {**values, "architectures": [architecture]}
        try:
            with config_errors():
                config = config_from_dict(dict(values))
        except ValueError as error:
            raise ValueError(f"config.json: {str(error).removeprefix('config.json: ')}") from None
    elif config is None:
        if checkpoint.kind not in ("legacy", "megatron"):
            raise ValueError("there is no config.json; name one with --config")
        config = infer_config(checkpoint.ranks, checkpoint.saved)
    if architecture and config.architecture != architecture:
        fits_files = False
        config = config.with_changes(architecture=architecture)
    if change is not None:
        config = change(config)

    # A hostile number of layers would take forever to build, even without storage.
    tensor_count = sum(1 for _ in checkpoint.tensors())
    layers = getattr(config, config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    layers += getattr(config, "decoder_layers", 0)
    if not 0 < layers <= tensor_count:
        raise ValueError(
            f"config.json: it claims {layers:,} layers, but the files have {tensor_count:,} "
            "tensors in all"
        )

    if fits_files:
        config = config.fitted_to(checkpoint.ranks[0].keys())
    if getattr(config, "may_add_logits_bias", False):
        config = config.with_changes(final_logits_bias=_has_logits_bias(checkpoint))
    tied = _is_tied(checkpoint, config, values, is_same or have_same_bytes)
    if tied is None:
        return config
    return config.with_changes(tie_word_embeddings=tied)


def read_architecture(values: Mapping[str, Any]) -> str:
    """Returns the architecture that the contents of a `config.json` name, or ""."""
    names = values.get("architectures")
    if isinstance(names, list) and names:
        return str(cast(list[Any], names)[0])
    return ""


def find_unstored(checkpoint: Checkpoint, model: NativeModel) -> set[str]:
    """Returns the names of a model's parameters of which the files store nothing."""
    stored = checkpoint.ranks[0].keys()
    if checkpoint.kind not in ("huggingface", "dcp"):
        return set(model.parameters) - stored
    found = model.name_map.find_current_names(stored, model.entries().values())
    unstored: set[str] = set()
    for name, entry in model.entries().items():
        if not any(part in found for part in entry.stored_names()):
            unstored.add(name)
    return unstored


def find_mismatched(
    checkpoint: Checkpoint, model: NativeModel
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the parameters that a Hugging Face folder stores in another shape.

    Returns:
        Name of a parameter -> the stored shape, and the model's, of its first tensor that differs.
    """
    if checkpoint.kind not in ("huggingface", "dcp"):
        raise ValueError(
            f"ignore_mismatched_sizes needs a Hugging Face folder, not {checkpoint.description}"
        )
    tensors = checkpoint.ranks[0]
    sources = model.name_map.find_current_names(tensors, model.entries().values())
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, entry in model.entries().items():
        parameter = model.parameters[name]
        spans = compute_stacked_ranges(parameter, entry)
        for part, span in zip(entry.stored_names(), spans, strict=True):
            wanted = compute_stored_shape(parameter, span, entry)
            source = sources.get(part)
            if source is not None and tensors[source].shape != wanted:
                mismatched.setdefault(name, (tensors[source].shape, wanted))
    return mismatched


@contextmanager
def config_errors() -> Generator[None, None, None]:
    """Turns any error that a wrong value in config.json causes into a ValueError that names the
    file.
    """
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


def compute_stacked_ranges(parameter: ParameterSpec, entry: NameEntry) -> list[tuple[int, int]]:
    """Returns the range along the parameter's `dim` that each stored tensor of its entry holds."""
    stored_names = entry.stored_names()
    if len(stored_names) == 1:
        length = parameter.shape[parameter.dim] if parameter.shape else 1
        return [(0, length)]
    groups = parameter.shard.groups if parameter.shard else ()
    if len(groups) != len(stored_names):
        raise ValueError(f"{parameter.name} has {len(groups)} groups for {', '.join(stored_names)}")
    ranges: list[tuple[int, int]] = []
    start = 0
    for group in groups:
        ranges.append((start, start + group))
        start += group
    return ranges


def compute_stored_shape(
    parameter: ParameterSpec, span: tuple[int, int], entry: NameEntry
) -> tuple[int, ...]:
    """Returns the shape in which a Hugging Face folder stores `span` of a parameter along its
    `dim`.
    """
    shape = list(parameter.shape)
    if entry.by_expert:
        rows = count_expert_rows(parameter)
        matrix = (rows, *shape[1:])
        return (shape[0] // rows, *(reversed(matrix) if entry.transpose else matrix))
    if shape:
        shape[parameter.dim] = span[1] - span[0]
    if entry.transpose:
        shape.reverse()
    return tuple(shape)


def count_expert_rows(parameter: ParameterSpec) -> int:
    """Returns the number of rows that each expert has of a parameter of a mixture."""
    assert parameter.shard is not None
    assert parameter.shard.is_nested
    return parameter.shard.splits[0].unit


def slice_stored(
    tensor: StoredTensor, span: tuple[int, int], parameter: ParameterSpec, entry: NameEntry
) -> tuple[TensorSlice, ...]:
    """Returns the slices that a tensor of a Hugging Face folder is of a parameter.

    Args:
        span: The range along the parameter's `dim` that the tensor holds.
        entry: The parameter's entry of the name map.
    """
    if entry.by_expert:
        return slice_experts(tensor, count_expert_rows(parameter), entry.transpose)
    return slice_tensor(tensor, (span,), parameter.dim, entry.transpose)


def have_same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Returns whether two stored tensors are equal bit for bit; stops at the first difference."""
    first_chunks = list_chunks(first)
    second_chunks = list_chunks(second)
    if len(first_chunks) != len(second_chunks):
        return False
    pairs = list(zip(first_chunks, second_chunks, strict=True))
    for (start, mine), (other_start, other) in pairs:
        if (start, mine.shape, mine.dtype) != (other_start, other.shape, other.dtype):
            return False
    for (_, mine), (_, other) in pairs:
        for start in range(0, mine.nbytes, CHUNK):
            if _read_bytes(mine, start, CHUNK) != _read_bytes(other, start, CHUNK):
                return False
    return True


def _read_bytes(tensor: StoredTensor, start: int, count: int) -> bytes:
    """Reads at most `count` bytes of a tensor from its byte `start` on."""
    descriptor = open_for_reading(tensor.file)
    try:
        return read_bytes(tensor, descriptor, start, min(count, tensor.nbytes - start))
    finally:
        close_file(descriptor)


def _is_tied(
    checkpoint: Checkpoint,
    config: ModelConfig,
    values: Mapping[str, Any],
    is_same: Callable[[StoredTensor, StoredTensor], bool],
) -> bool | None:
    """Returns whether the output head is tied to the word embedding.

    The files decide, not the flag in config.json, which some programs always set (see
    `models.t5.config`). A head that is stored next to the embedding is a copy of a tied one if both
    have the same bytes. If the embedding is not stored, the configuration decides, because the file
    of a tied model may use either name. Returns None for families whose models are always tied, or
    never.
    """
    name_map = family(config.model_type).name_map
    untied = set(name_map.untied_names())
    if not untied:
        return None
    if config.has_own_embeddings:
        return False  # Nothing is tied, even if tensors have equal values.
    if checkpoint.saved is not None:
        return _is_tied_in_megatron(checkpoint, checkpoint.saved, config, is_same)
    if checkpoint.kind not in ("huggingface", "dcp"):
        head_parameters = {entry.native for entry in name_map.untied_entries()}
        return not head_parameters & checkpoint.ranks[0].keys()

    known = name_map.stored_names()
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.ranks[0].items():
        tensors[name_map.to_current_name(name, known)] = tensor
    heads = [(name, kept) for name, kept in name_map.aliases if name in untied and name in tensors]
    if not heads:
        return config.ties_without_head or values.get("tie_word_embeddings") is not False

    for head, kept in heads:
        # The embedding may be stored under its own name or under an alias of it.
        embedding_names = [kept]
        for alias, same in name_map.aliases:
            if same == kept and alias not in untied:
                embedding_names.append(alias)
        embedding = next((tensors[name] for name in embedding_names if name in tensors), None)
        if embedding is None:
            repeats_embedding = getattr(config, "tie_word_embeddings", True)
        else:
            repeats_embedding = is_same(tensors[head], embedding)
        if not repeats_embedding:
            return False
    return True


def _has_logits_bias(checkpoint: Checkpoint) -> bool:
    """Returns whether the files have a bias of the logits that is not zero."""
    tensors = checkpoint.ranks[0]
    if checkpoint.kind not in ("huggingface", "dcp"):
        return "head.fixed_bias" in tensors
    if LOGITS_BIAS not in tensors:
        return False
    for _, chunk in list_chunks(tensors[LOGITS_BIAS]):
        for start in range(0, chunk.nbytes, CHUNK):
            if any(_read_bytes(chunk, start, CHUNK)):
                return True
    return False


def _is_tied_in_megatron(
    checkpoint: Checkpoint,
    saved: SavedRun,
    config: ModelConfig,
    is_same: Callable[[StoredTensor, StoredTensor], bool],
) -> bool:
    """Returns whether the head of a checkpoint of Megatron-LM is tied.

    Its arguments decide, or else whether the last stage repeats the embedding.
    """
    tensors = checkpoint.ranks[0]
    megatron = find_megatron_map(config)
    names = megatron.to_local_names(tensors)
    if TIED_HEAD not in names or TIED_HEAD not in megatron.name_map.untied_names():
        return True
    untied = saved.arguments.get(UNTIED)
    if isinstance(untied, bool):
        return not untied
    return EMBEDDING in names and is_same(tensors[names[TIED_HEAD]], tensors[names[EMBEDDING]])


def find_megatron_map(config: ModelConfig) -> MegatronMap:
    """Returns how Megatron-LM stores models of a configuration's family.

    Raises ValueError if Megatron-LM does not have the family.
    """
    found = family(config.model_type).megatron
    if found is None:
        having = ", ".join(
            facts.config.model_type for facts in list_families() if facts.megatron is not None
        )
        raise ValueError(
            f"Megatron-LM has no {config.model_type} that equals transformers'; it has {having}"
        )
    return found


def _check_dtypes(layout: CheckpointLayout) -> None:
    """Raises ValueError if a parameter is stored in a type that is not floating-point."""
    for name, placement in layout.placements.items():
        for part in placement.slices():
            if part.tensor.dtype not in FLOATS:
                raise ValueError(
                    f"{part.tensor} has type {torch_name(part.tensor.dtype)}, but {name} must have "
                    "a floating-point type"
                )


def _map_huggingface(
    checkpoint: Checkpoint, model: NativeModel, absent: Collection[str]
) -> MappedCheckpoint:
    """Finds the parameters in a Hugging Face folder, or in torch's distributed checkpoint of
    one.
    """
    tensors = checkpoint.ranks[0]
    untied = getattr(model.config, "tie_word_embeddings", True) is False
    match = model.name_map.match(model.parameters, tensors, untied=untied)
    _choose_biases(checkpoint, model, match)
    stored: dict[str, tuple[str, ...]] = {}
    for name, entry in match.entries.items():
        stored[name] = tuple(match.sources[current] for current in entry.stored_names())

    # A tied tensor may be stored under several names. A DCP folder can also have two names for the
    # same bytes, which are then no second copy.
    ties: dict[str, str] = {}
    used: set[str] = set()
    for alias, kept in match.aliases.items():
        if kept not in match.sources:
            continue
        source = match.sources[kept]
        if checkpoint.kind == "dcp" and _locate(tensors[alias]) == _locate(tensors[source]):
            used.add(alias)
        else:
            ties[alias] = source
    names = StoredNames(stored, ties)

    placements: dict[str, ParameterPlacement] = {}
    problems: list[str] = []
    for name, parameter in model.parameters.items():
        entry = match.entries[name]
        spans = compute_stacked_ranges(parameter, entry)
        copies: list[tuple[TensorSlice, ...]] = []
        for copy in names.list_copies(name):
            used.update(copy)
            parts: list[TensorSlice] = []
            for stored_name, span in zip(copy, spans, strict=True):
                expected = compute_stored_shape(parameter, span, entry)
                _check_shape(tensors[stored_name], expected, name, problems)
                if tensors[stored_name].shape == expected:
                    parts += slice_stored(tensors[stored_name], span, parameter, entry)
            copies.append(tuple(parts))
        if not problems:
            placements[name] = _widen_parts(
                ParameterPlacement(name, parameter.shape or (1,), parameter.dim, tuple(copies))
            )
    _refuse_shapes(problems)
    extras = {name: tensor for name, tensor in tensors.items() if name not in used}
    return MappedCheckpoint(checkpoint, model, CheckpointLayout(placements, extras), names, {})


def _choose_biases(checkpoint: Checkpoint, model: NativeModel, match: Match) -> None:
    """Leaves in a match the one of two stored biases of a head that transformers computes with.

    Its heads have a bias of their own and one in their last layer, which are one tensor unless the
    files have different values for both. Then, or with `tie_word_embeddings: false`, the last
    layer's counts.

    Raises:
        ValueError: Only the other one is stored, and the configuration says that they differ.
    """
    tensors = checkpoint.ranks[0]
    current_names = {name: model.name_map.to_current_name(name, ()) for name in match.aliases}
    is_untied = (checkpoint.config or {}).get("tie_word_embeddings") is False
    for alias, kept in model.name_map.aliases:
        if not kept.endswith(".bias") or kept not in match.sources:
            continue
        source = match.sources[kept]
        stored = next((name for name in match.aliases if current_names[name] == alias), None)
        if stored is not None and not have_same_bytes(tensors[stored], tensors[source]):
            warnings.warn(
                f"{stored} differs from {source}, although they are one bias; as in transformers, "
                f"{stored} counts",
                stacklevel=2,
            )
            match.sources[kept] = stored
            del match.aliases[stored]
        elif stored is None and is_untied and source != alias:
            raise ValueError(
                f"the checkpoint lacks {alias}, which differs from {source} if "
                "tie_word_embeddings is false"
            )


def _widen_parts(placement: ParameterPlacement) -> ParameterPlacement:
    """Returns the placement with all its tensors in one type, which can represent all values."""
    dtypes = {part.tensor.dtype for part in placement.slices()}
    if len(dtypes) == 1 or not dtypes <= {"F64", "F32", "F16", "BF16"}:
        return placement
    widest = "F64" if "F64" in dtypes else "F32"
    copies: list[tuple[TensorSlice, ...]] = []
    for copy in placement.copies:
        parts: list[TensorSlice] = []
        for part in copy:
            narrow = part.tensor
            if narrow.dtype != widest:
                wide = WidenedTensor(
                    narrow.name,
                    narrow.file,
                    widest,
                    narrow.shape,
                    narrow.offset,
                    narrow,
                    file_state=narrow.file_state,
                )
                part = replace(part, tensor=wide)
            parts.append(part)
        copies.append(tuple(parts))
    return replace(placement, copies=tuple(copies))


def _locate(tensor: StoredTensor) -> list[tuple[Path, int]]:
    """Returns the file and the offset of each piece of a tensor."""
    return [(chunk.file, chunk.offset) for _, chunk in list_chunks(tensor)]


def _check_shape(
    tensor: StoredTensor, expected: tuple[int, ...], name: str, problems: list[str]
) -> None:
    """Adds a line to `problems` if a tensor does not have the shape that a parameter needs."""
    if tensor.shape != expected:
        problems.append(
            f"{tensor} has shape {list(tensor.shape)}, but {name} needs {list(expected)} according "
            "to config.json"
        )


def _refuse_shapes(problems: list[str]) -> None:
    """Raises ValueError with the first problems, if there are any."""
    if not problems:
        return
    message = "; ".join(problems[:MOST_PROBLEMS])
    if len(problems) > MOST_PROBLEMS:
        message += f"; and {len(problems) - MOST_PROBLEMS} more"
    raise ValueError(message)


def _map_shards(
    checkpoint: Checkpoint, model: NativeModel, absent: Collection[str]
) -> MappedCheckpoint:
    """Finds the parameters in a folder of shardzoo, by its manifest."""
    manifest = checkpoint.manifest
    assert manifest is not None  # Every checkpoint of this kind has one.
    _check_manifest(manifest, model, absent)
    placements = _place_ranks(
        checkpoint, model.parameters, {name: name for name in model.parameters}
    )

    for name, placement in placements.items():
        wanted = manifest.tensors[name].dtype
        for part in placement.slices():
            if torch_name(part.tensor.dtype) != wanted:
                raise ValueError(
                    f"{part.tensor} has type {part.tensor.dtype}, but {wanted} in the manifest"
                )

    for name, placement in placements.items():
        if len(placement.copies) > 1 and len(set(manifest.tensors[name].sha256)) > 1:
            placements[name] = _keep_first_copy(checkpoint.folder, placement)

    digests: dict[tuple[Path, str], str] = {}
    for name, record in manifest.tensors.items():
        for tensors, digest in zip(checkpoint.ranks, record.sha256, strict=True):
            digests[tensors[name].file, name] = digest
    extras = checkpoint.extras
    for name, record in manifest.extras.items():
        tensor = extras[name]
        if (tensor.shape, torch_name(tensor.dtype)) != (record.shape, record.dtype):
            raise ValueError(
                f"{tensor} is {tensor.dtype} {list(tensor.shape)}, but {record.dtype} "
                f"{list(record.shape)} in the manifest"
            )
        digests[tensor.file, name] = record.sha256
    names = _read_names(manifest, model)
    return MappedCheckpoint(checkpoint, model, CheckpointLayout(placements, extras), names, digests)


def _keep_first_copy(folder: Path, placement: ParameterPlacement) -> ParameterPlacement:
    """Returns the placement with its first copy alone; in a run, the others may differ by rounding.

    There, each tensor-parallel rank updates its own copy of a replicated parameter. If the ranks'
    parts are unequal, ZeRO's flat buffers have it at different places, and a loop over vectors
    rounds the last elements in another way.

    Raises ValueError if the copies differ by more, or are not those of a run.
    """
    if not (folder / STATE).exists():
        raise ValueError(
            f"{folder}: tensor {placement.name} must be the same on all {len(placement.copies)} "
            "ranks, but its hashes differ"
        )
    with TensorReader() as reader:
        first, *others = [reader.whole(copy[0].tensor).double() for copy in placement.copies]
    is_16_bit = torch_name(placement.dtype) in ("bfloat16", "float16")
    relative = 2.0**-6 if is_16_bit else 1e-4
    absolute = relative * float(first.abs().max())
    for number, other in enumerate(others, 1):
        if not torch.allclose(first, other, rtol=relative, atol=absolute):
            difference = float((first - other).abs().max())
            raise ValueError(
                f"{placement.copies[number][0].tensor} differs from "
                f"{placement.copies[0][0].tensor} by {difference:.2g}; copies of a parameter may "
                "differ by rounding only"
            )
    return replace(placement, copies=placement.copies[:1])


def _read_names(manifest: Manifest, model: NativeModel) -> StoredNames:
    """Returns the names that a manifest keeps for a merge. ValueError if they do not fit the
    model.
    """
    known = model.list_hf_names()
    stored: dict[str, tuple[str, ...]] = {}
    for name in model.parameters:
        names = manifest.tensors[name].stored or known[name]
        if len(names) != len(known[name]):
            raise ValueError(
                f"the manifest stores {name} as {', '.join(names)}, but this model needs "
                f"{len(known[name])} names for it"
            )
        stored[name] = names
    all_names = {name for names in stored.values() for name in names}
    unknown = sorted(set(manifest.ties.values()) - all_names)
    if unknown:
        raise ValueError(
            f"the manifest ties a tensor to {unknown[0]}, which the model does not have"
        )
    return StoredNames(stored, manifest.ties)


def _check_manifest(manifest: Manifest, model: NativeModel, absent: Collection[str]) -> None:
    """Raises ValueError unless the manifest describes the same model as config.json."""
    if manifest.model_type != model.config.model_type or manifest.vocab_size != model.vocab_size:
        raise ValueError(
            f"the manifest describes a {manifest.model_type} with {manifest.vocab_size} tokens, "
            f"but config.json a {model.config.model_type} with {model.vocab_size}"
        )
    stored = {name for name in manifest.tensors if name not in absent}
    refuse_names(sorted(model.parameters.keys() - stored), sorted(stored - model.parameters.keys()))
    for name, parameter in model.parameters.items():
        record = manifest.tensors[name]
        if record.shape != parameter.shape:
            raise ValueError(
                f"{name} has shape {list(record.shape)} in the manifest, but "
                f"{list(parameter.shape)} according to config.json"
            )
        shard = parameter.shard.to_record() if parameter.shard else None
        if shard != record.shard:
            raise ValueError(
                f"{name} is split as {record.shard} in the manifest, but as {shard} in this model"
            )


def _map_legacy(
    checkpoint: Checkpoint, model: NativeModel, absent: Collection[str]
) -> MappedCheckpoint:
    """Finds the parameters in rank files of the original GLM, DeepSpeed or FlagAI."""
    if absent:
        raise ValueError(
            f"new modules cannot be added to {checkpoint.description}; split or merge the folder "
            "first"
        )
    tensors = checkpoint.ranks[0]
    names: dict[str, str] = {}
    if model.parameters.keys() <= tensors.keys():
        names.update({name: name for name in model.parameters})
    else:
        match = model.name_map.match(model.parameters, tensors)
        for entry in match.entries.values():
            if entry.transpose or len(entry.stored_names()) > 1:
                raise ValueError(
                    "mp_rank files of this family must have shardzoo's native names for the tensors"
                )
        for name, entry in match.entries.items():
            names[name] = match.sources[entry.stored_names()[0]]
    unknown = sorted(tensors.keys() - set(names.values()))
    if unknown:
        raise ValueError(f"{tensors[unknown[0]]} is not a parameter of the model")

    # Some of these programs pad the vocabulary as this package's layers do, and others not at all.
    specs: dict[str, ParameterSpec] = {}
    size = len(checkpoint.ranks)
    for name, parameter in model.parameters.items():
        can_be_padded = parameter.shard is not None and parameter.shard.pad_multiple
        if can_be_padded and tensors[names[name]].shape == parameter.local_shape(0, size):
            specs[name] = parameter
        else:
            specs[name] = parameter.without_padding()
    layout = CheckpointLayout(_place_ranks(checkpoint, specs, names))
    _check_ranks_differ(checkpoint, model, names)
    return MappedCheckpoint(checkpoint, model, layout, StoredNames(model.list_hf_names(), {}), {})


def _map_megatron(
    checkpoint: Checkpoint, model: NativeModel, absent: Collection[str]
) -> MappedCheckpoint:
    """Finds the parameters in a checkpoint of Megatron-LM."""
    if absent:
        raise ValueError(
            f"new modules cannot be added to a {checkpoint.description}; split or merge the folder "
            "first"
        )
    saved = checkpoint.saved
    assert saved is not None  # Every checkpoint of this kind has it.
    megatron = find_megatron_map(model.config)
    megatron.check(saved.arguments, checkpoint.ranks[0])
    megatron.check_config(model.config, saved.arguments)
    heads = saved.arguments.get("num_attention_heads")
    if isinstance(heads, int) and heads != model.config.attention_heads:
        raise ValueError(
            f"config.json has {model.config.attention_heads} attention heads, but its arguments "
            f"{heads}"
        )

    # A mixture's parameters expert by expert, and the same tensors by the names that entries have.
    parted = replace(model, parameters=part_experts(model.parameters))
    local_names = megatron.to_local_names(checkpoint.ranks[0])
    ranks: list[Mapping[str, StoredTensor]] = []
    for tensors in checkpoint.ranks:
        named = {name: tensors[own] for name, own in local_names.items()}
        ranks.append(megatron.part_halves(parted.parameters, named))
    named_alike = replace(checkpoint, ranks=tuple(ranks))
    _check_zeros(ranks, megatron.zeros)
    repeats = [name for name in ranks[0] if find_repeated(name) is not None]
    not_parameters = {*repeats, *megatron.zeros}
    match = megatron.match(
        parted.parameters, [name for name in ranks[0] if name not in not_parameters]
    )
    names: dict[str, str] = {}
    specs: dict[str, ParameterSpec] = {}
    for name, parameter in parted.parameters.items():
        names[name] = match.sources[match.entries[name].stored_names()[0]]
        rows = (ranks[0][names[name]].shape or (1,))[0]
        specs[name] = megatron.stored_spec(parameter, saved.row_order, rows)
    placements = _place_ranks(named_alike, specs, names)

    # The last pipeline stage has a copy of a tied embedding, and several stages of an encoder and a
    # decoder have the same tensors.
    natives = {stored_name: name for name, stored_name in names.items()}
    for alias, kept in match.aliases.items():
        natives[alias] = natives[kept]
    copied = list(match.aliases)
    for name in repeats:
        kept = find_repeated(name)
        if kept in natives:
            natives[name] = natives[kept]
            copied.append(name)
        elif kept not in megatron.zeros:
            raise ValueError(f"{ranks[0][name]} repeats no tensor of the model")
    for alias in copied:
        native = natives[alias]
        copy = _place_ranks(named_alike, {native: specs[native]}, {native: alias})[native]
        copies = placements[native].copies + copy.copies
        placements[native] = replace(placements[native], copies=copies)
    _check_ranks_differ(named_alike, parted, names)
    stored_names = StoredNames(model.list_hf_names(), {})
    layout = CheckpointLayout(join_experts(model.parameters, placements))
    return MappedCheckpoint(checkpoint, model, layout, stored_names, {})


def _check_zeros(ranks: Sequence[Mapping[str, StoredTensor]], zeros: Collection[str]) -> None:
    """Raises ValueError if a tensor that the model does not have is not zero."""
    for tensors in ranks:
        for name, tensor in tensors.items():
            if (find_repeated(name) or name) not in zeros:
                continue
            for _, chunk in list_chunks(tensor):
                for start in range(0, chunk.nbytes, CHUNK):
                    if any(_read_bytes(chunk, start, CHUNK)):
                        raise ValueError(
                            f"{tensor} is not zero, but the head of such a model has no bias"
                        )


def _check_ranks_differ(
    checkpoint: Checkpoint, model: NativeModel, names: Mapping[str, str]
) -> None:
    """Raises ValueError if two rank files have the same first bytes in every split matrix.

    Such files record no digests, so that a file copied over another one would be read in silence.
    """
    if len(checkpoint.ranks) == 1:
        return
    split_matrices = [
        names[parameter.name]
        for parameter in model.parameters.values()
        if parameter.shard is not None and len(parameter.shape) > 1
    ]
    seen: dict[tuple[bytes, ...], int] = {}
    for rank, tensors in enumerate(checkpoint.ranks):
        chunks = [list_chunks(tensors[name])[0][1] for name in split_matrices]
        beginnings = tuple(_read_bytes(chunk, 0, HEAD_BYTES) for chunk in chunks)
        # Matrices of one repeated byte, such as zeros, are equal on all ranks for a good reason.
        is_constant = all(len(set(content)) <= 1 for content in beginnings)
        if beginnings in seen and not is_constant:
            file_name = next(iter(tensors.values())).file.name
            raise ValueError(
                f"{file_name} repeats rank {seen[beginnings]} in every split matrix: one of the "
                "two is wrong"
            )
        seen[beginnings] = rank


def _place_ranks(
    checkpoint: Checkpoint, parameters: Mapping[str, ParameterSpec], names: Mapping[str, str]
) -> dict[str, ParameterPlacement]:
    """Returns where the rank files hold the parameters.

    Args:
        parameters: Native name -> the parameter as the files split it.
        names: Native name -> name of the parameter in each rank's file.

    Raises:
        ValueError: A tensor has a wrong shape.
    """
    problems: list[str] = []
    size = len(checkpoint.ranks)
    for name, parameter in parameters.items():
        for rank, tensors in enumerate(checkpoint.ranks):
            if checkpoint.kind == "shards":
                expected = parameter.local_shape(rank, size)
            else:  # Other programs split evenly.
                expected = parameter.even_shape(size)
            _check_shape(tensors[names[name]], expected, name, problems)
    _refuse_shapes(problems)
    by_rank = [{name: tensors[names[name]] for name in parameters} for tensors in checkpoint.ranks]
    return place_by_rank(parameters, by_rank)


class _SkipInitialization(TorchFunctionMode):
    """Skips `torch.nn.init`, which on parameters without storage only imports half of torch's
    compiler.
    """

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
