"""Stores a model's weights in a checkpoint: as shards for the converter, or as a folder for
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...checkpoint.checkpoint import open_checkpoint
from ...checkpoint.folder_files import CONFIG, GENERATION_CONFIG
from ...checkpoint.manifest import Manifest, TensorRecord
from ...checkpoint.rank_files import (
    OPTIMIZER,
    ShardedReader,
    TensorPart,
    open_rank_files,
    rank_file,
)
from ...checkpoint.safetensors_header import read_header
from ...checkpoint.stored_tensor import index_by_name
from ...checkpoint.tensor_reader import TensorReader
from ...data.tokenizers.vocabulary import Vocabulary
from ...files.safe_paths import checked_file
from ...files.strict_json import read_folder_json
from ...models.auto import whole_parameters
from ...models.config import ModelConfig
from ...models.lora import (
    WEIGHTS_FILE,
    check_same_lora,
    gather_weights,
    hash_model,
    list_peft_names,
    load_weights,
    write_adapter_config,
)
from ...models.packing import find_packed_parameters
from ...mpu.mesh import axis_ranks, axis_sizes
from ..engines.state import persistent_buffers
from ..launch.ranks import Ranks, on_first_rank

WEIGHTS = "rank"
MODEL_FILE = "model.safetensors"
# What torch's FSDP2 puts before the name of a model's class.
FSDP_PREFIX = "FSDP"
# It has the digest of the model that the LoRA weights in a checkpoint belong to.
BASE_FILE = "adapter_base.json"

Hashes = Mapping[str, str]
Tensors = Mapping[str, Tensor | TensorPart]


class ModelFiles(Protocol):
    """Stores one kind of model."""

    def weights_file(self, ranks: Ranks) -> str | None:
        """Returns the name of this rank's file, if it has one.

        The data-parallel ranks write it together.
        """
        ...

    def stored(self, tensors: Tensors) -> Tensors:
        """Returns the contents of this rank's file, from all tensors of the model on this rank.

        Collective.
        """
        ...

    def describe(
        self, hashes: Sequence[Hashes], vocabulary: Vocabulary | None
    ) -> Callable[[Path], None]:
        """Returns a function that writes the other files of the model, such as its configuration,
        into a folder.

        `hashes` are the sha256 of each tensor by name, for each tensor-parallel rank. `vocabulary`
        is the tokenizer's.
        """
        ...

    def load_weights(self, folder: Path, ranks: Ranks) -> None:
        """Reads a checkpoint's weights into the model.

        Raises ValueError if it holds another model.
        """
        ...


def model_files(model: nn.Module) -> ModelFiles:
    """Returns the `ModelFiles` for a model of the zoo, or for any other."""
    if isinstance(getattr(model, "config", None), ModelConfig):
        if getattr(model, "lora", None) is not None:
            return AdapterFiles(model)
        return ShardedFiles(model)
    return WholeFiles(model)


class ShardedFiles:
    """Stores a model of the zoo, in the converter's format."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        # While a thread writes, FSDP may put other parameters in their places for a forward pass.
        self._parameters = whole_parameters(model)

    def weights_file(self, ranks: Ranks) -> str | None:
        return rank_file(Path(), WEIGHTS, ranks.tp_rank, ranks.pp_rank).name

    def stored(self, tensors: Tensors) -> Tensors:
        return tensors

    def describe(
        self, hashes: Sequence[Hashes], vocabulary: Vocabulary | None
    ) -> Callable[[Path], None]:
        config = self.model.config
        generation = getattr(self.model, "generation_config", None)
        manifest = replace(make_manifest(self._parameters, config, hashes), vocabulary=vocabulary)

        def write(folder: Path) -> None:
            config.save(folder)
            # The settings of the folder from which the model was loaded, if config.json lacks them.
            if generation is not None and not generation.follows_from(config.to_dict()):
                generation.save(folder)
            manifest.write(folder)

        return write

    @torch.no_grad()
    def load_weights(self, folder: Path, ranks: Ranks) -> None:
        parameters = dict(self.model.named_parameters())
        shards = {name: getattr(parameter, "shard", None) for name, parameter in parameters.items()}
        stored = open_checkpoint(folder)
        if stored.manifest is None:
            raise ValueError(f"{folder} is a {stored.description}, not a training checkpoint")
        check_names(folder, set(stored.ranks[0]), set(whole_parameters(self.model)))
        for name, parameter in parameters.items():
            shard = shards[name]
            full = shard.shape if shard else tuple(parameter.shape)
            # The shards may agree all the same, such as those of vocabularies that are padded to
            # the same size.
            found = stored.manifest.tensors[name].shape
            if found != full:
                raise _another_shape(folder, name, found, full)
        with ShardedReader(stored.ranks, shards) as reader:
            for name, parameter in parameters.items():
                part = reader.read_part(name, axis_ranks(ranks.mesh), axis_sizes(ranks.mesh))
                copy_checked(folder, name, part, parameter)


class AdapterFiles:
    """Stores the LoRA weights of a model of the zoo in peft's files, and names the frozen base
    model by its digest.

    The weights are whole, so that peft loads a checkpoint of any layout, and a run resumes in any
    other. Raises ValueError if other parameters are trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        trained = {name for name, value in model.named_parameters() if value.requires_grad}
        others = trained - list_peft_names(model).keys()
        if others:
            raise ValueError(
                f"{sorted(others)[0]} is trained besides the LoRA weights, whose files cannot hold it; name its module "
                "in lora_modules_to_save"
            )

    def weights_file(self, ranks: Ranks) -> str | None:
        return WEIGHTS_FILE if ranks.tp_rank == ranks.pp_rank == 0 else None

    def stored(self, tensors: Tensors) -> Tensors:
        return gather_weights(self.model)

    def describe(
        self, hashes: Sequence[Hashes], vocabulary: Vocabulary | None
    ) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            base = ""
            if self._base is not None:
                base = str(self._base.resolve())
            write_adapter_config(folder, self.model.lora.config, base)
            base_record = {"sha256": self._base_digest, "packed": self._packed_format}
            (folder / BASE_FILE).write_text(json.dumps(base_record) + "\n")

        return write

    def load_weights(self, folder: Path, ranks: Ranks) -> None:
        if not (folder / WEIGHTS_FILE).exists():
            raise ValueError(f"{folder} has no {WEIGHTS_FILE}, so it holds another kind of model")
        record = read_folder_json(folder, BASE_FILE) or {}
        digest = record.get("sha256")
        if self._base and digest and on_first_rank(lambda: self._base_digest) != digest:
            raise ValueError(
                f"{folder} belongs to another base model than {self._base}, whose weights have another digest"
            )
        packed = record.get("packed")
        if packed != self._packed_format:
            raise ValueError(
                f"{folder} was trained on a base in {packed or 'its own type'}, and cannot go on "
                f"with {self._packed_format or 'its own type'}; set base_precision as it was"
            )
        check_same_lora(self.model, folder)
        load_weights(self.model, folder)

    @property
    def _base(self) -> Path | None:
        found = getattr(self.model, "name_or_path", None)
        return Path(found) if found else None

    @property
    def _packed_format(self) -> str | None:
        """The format of the base's packed weights; None if they are not packed."""
        packed = find_packed_parameters(self.model)
        return next((parameter.packing.format for parameter in packed.values()), None)

    @cached_property  # of files that may be larger than memory, and each save names it
    def _base_digest(self) -> str | None:
        return self._base and hash_model(self._base)


class WholeFiles:
    """Stores any other model: one file with its parameters and persistent buffers, and
    transformers' configuration.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        # FSDP gives the model a subclass of its own class.
        self._architecture = type(model).__name__.removeprefix(FSDP_PREFIX)

    def weights_file(self, ranks: Ranks) -> str | None:
        return MODEL_FILE

    def stored(self, tensors: Tensors) -> Tensors:
        return tensors

    def describe(
        self, hashes: Sequence[Hashes], vocabulary: Vocabulary | None
    ) -> Callable[[Path], None]:
        config: Any = getattr(self.model, "config", None)
        generation: Any = getattr(self.model, "generation_config", None)
        texts = {}
        if hasattr(config, "to_dict"):
            values = {**config.to_dict(), "architectures": [self._architecture]}
            texts[CONFIG] = json.dumps(values, indent=2, sort_keys=True, default=str) + "\n"
        if hasattr(generation, "to_json_string"):
            texts[GENERATION_CONFIG] = generation.to_json_string()

        def write(folder: Path) -> None:
            for name, text in texts.items():
                (folder / name).write_text(text)

        return write

    @torch.no_grad()
    def load_weights(self, folder: Path, ranks: Ranks) -> None:
        wanted = dict(self.model.named_parameters()) | persistent_buffers(self.model)
        path = folder / MODEL_FILE
        if not path.exists():
            raise ValueError(f"{folder} has no {MODEL_FILE}, so it holds another kind of model")
        stored = index_by_name(read_header(checked_file(folder, MODEL_FILE))[0])
        check_names(folder, set(stored), set(wanted))
        with TensorReader() as reader:
            for name, value in wanted.items():
                copy_checked(folder, name, reader.whole(stored[name]), value)


def make_manifest(
    parameters: Mapping[str, nn.Parameter], config: ModelConfig, hashes_by_rank: Sequence[Hashes]
) -> Manifest:
    """Returns the manifest of this run's shards.

    Args:
        parameters: Those of the whole model, by name.
    """
    records = {}
    padded_vocab_size = config.vocab_size
    dtype = _name_dtype(next(iter(parameters.values())))
    for name, parameter in parameters.items():
        shard = getattr(parameter, "shard", None)
        if shard is not None and shard.pad_multiple and shard.shape[shard.dim] == config.vocab_size:
            padded_vocab_size = (
                len(hashes_by_rank) * shard.local_shape(0, len(hashes_by_rank))[shard.dim]
            )
        records[name] = TensorRecord(
            shape=tuple(
                shard.shape if shard else getattr(parameter, "ds_shape", parameter.shape)
            ),  # ZeRO 3 empties it
            dtype=dtype if parameter.is_meta else _name_dtype(parameter),
            shard=shard.to_record() if shard else None,
            sha256=tuple(hashes[name] for hashes in hashes_by_rank),
        )
    return Manifest(
        model_type=config.model_type,
        tensor_parallel_size=len(hashes_by_rank),
        vocab_size=config.vocab_size,
        padded_vocab_size=padded_vocab_size,
        tensors=records,
    )


def check_names(folder: Path, stored: set[str], wanted: set[str]) -> None:
    """Raises ValueError unless a checkpoint has exactly the tensors that the model wants."""
    for kind, names in (
        ("lacks tensors", wanted - stored),
        ("has unexpected tensors", stored - wanted),
    ):
        if names:
            few = ", ".join(sorted(names)[:3])
            if len(names) > 3:
                few += f" and {len(names) - 3} more"
            raise ValueError(f"{folder} {kind}: {few}; it holds another model")


def _name_dtype(parameter: nn.Parameter) -> str:
    """Returns the type in which a parameter is stored, which is another one than its own if FSDP
    rounds it.
    """
    sharded = getattr(parameter, "sharded", None)
    dtype = parameter.dtype if sharded is None else sharded.stored_dtype
    return str(dtype).removeprefix("torch.")


def _another_shape(
    folder: Path, name: str, found: Sequence[int], wanted: Sequence[int]
) -> ValueError:
    return ValueError(
        f"{folder}: {name} has shape {list(found)}, but the model wants {list(wanted)}; it holds another model"
    )


def copy_checked(folder: Path, name: str, value: Tensor, into: Tensor) -> None:
    """Copies a tensor of a checkpoint into the model's. Raises ValueError for another shape."""
    if value.shape != into.shape:
        raise _another_shape(folder, name, value.shape, into.shape)
    # Under FSDP, a rank has a part of the parameter.
    sharded = getattr(into, "sharded", None)
    if sharded is not None:
        sharded.fill(value)
    else:
        into.copy_(value)


class StoredOptimizer(Mapping[str, Tensor]):
    """This rank's optimizer state in a checkpoint of any layout; a tensor is read when it is asked
    for.

    Raises ValueError if the state was not saved.
    """

    def __init__(self, folder: Path, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        stored = open_rank_files(folder, OPTIMIZER)
        if not stored:
            raise ValueError(
                f"{folder} was saved without the optimizer's state (save_optim=False), so a run "
                "cannot resume from it; to start another run from its weights, set load_dir, "
                "load_optim=False and another save_dir"
            )
        parameters = dict(model.named_parameters())
        shards = {}
        self._names: dict[str, None] = {}
        for name, tensor in stored[0].items():
            owner = name.split("/", 1)[1]
            if ranks.pp_size == 1 or owner in parameters:
                self._names[name] = None
            parameter = parameters.get(owner)
            if parameter is None:
                continue
            # Others, such as step counts, are the same on all ranks. ZeRO 3 empties parameters.
            dims = len(getattr(parameter, "ds_shape", parameter.shape))
            if len(tensor.shape) == dims > 0:
                shards[name] = getattr(parameter, "shard", None)
        self._reader = ShardedReader(stored, shards)

    def __enter__(self) -> StoredOptimizer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.__exit__(*exception)

    def __getitem__(self, name: str) -> Tensor:
        mesh = self._ranks.mesh
        return self._reader.read_part(name, axis_ranks(mesh), axis_sizes(mesh))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
