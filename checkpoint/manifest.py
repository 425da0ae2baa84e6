"""Reads and writes `manifest.json`, which describes a folder of shards.

The manifest is written last, so a folder without one is incomplete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, cast

from ..data.tokenizers.files import has_tokenizer
from ..data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from ..data.tokenizers.vocabulary import Vocabulary
from ..files.durable import write_durably
from ..files.json_digest import add_digest, remove_digest
from ..files.strict_json import maps_to_text, read_folder_json
from .folder_files import check_auxiliary_files, refuse_run_folder

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MOST_RANKS = 100_000


@dataclass(frozen=True)
class TensorRecord:
    """A parameter in a folder of shards.

    Attributes:
        shape: The full shape without padding.
        dtype: PyTorch's name of the type.
        shard: The fields of its `Shard`, or None if it is replicated.
        sha256: One digest for each rank.
        stored: The names in the Hugging Face folder that it came from; empty if they were the
            current names.
    """

    shape: tuple[int, ...]
    dtype: str
    shard: dict[str, Any] | None
    sha256: tuple[str, ...]
    stored: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExtraRecord:
    """A tensor of the Hugging Face folder that is not a parameter.

    `extras.safetensors` keeps it unchanged.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder of shards.

    Attributes:
        model_type: The family.
        tensor_parallel_size: The number of ranks.
        vocab_size: The vocabulary size without padding.
        padded_vocab_size: The vocabulary size as stored, over all ranks.
        tensors: The parameters by native name.
        ties: Name of a tensor of the Hugging Face folder that repeats another one -> name of that
            other tensor.
        extras: The tensors in `extras.safetensors`.
        vocabulary: The vocabulary of the tokenizer that the model was trained with, if it is known.
    """

    model_type: str
    tensor_parallel_size: int
    vocab_size: int
    padded_vocab_size: int
    tensors: dict[str, TensorRecord]
    ties: dict[str, str] = field(default_factory=dict[str, str])
    extras: dict[str, ExtraRecord] = field(default_factory=dict[str, ExtraRecord])
    vocabulary: Vocabulary | None = None

    def to_json(self) -> str:
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        if self.vocabulary is None:
            del content["vocabulary"]
        return json.dumps(add_digest(content), indent=1)

    def write(self, folder: Path) -> None:
        """Writes the manifest durably: under another name first."""
        write_durably(folder / MANIFEST, self.to_json())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest of a folder.

        Raises:
            ValueError: It is missing, damaged, or of an unsupported format version.
        """
        path = folder / MANIFEST
        content = read_folder_json(folder, MANIFEST)
        if content is None:
            raise ValueError(f"{folder} has no {MANIFEST}: it is not a complete folder of shards")
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format version {version}; this version reads {FORMAT_VERSION}"
            )
        remove_digest(content, path)
        try:
            del content["format_version"]
            tensors: dict[str, TensorRecord] = {}
            for name, record in content.pop("tensors").items():
                tensors[name] = TensorRecord(**_lists_to_tuples(record))
            extras: dict[str, ExtraRecord] = {}
            for name, record in content.pop("extras").items():
                extras[name] = ExtraRecord(**_lists_to_tuples(record))
            vocabulary = None
            recorded = content.pop("vocabulary", None)
            if recorded is not None:
                vocabulary = Vocabulary.from_json(recorded, str(path))
            manifest = cls(tensors=tensors, extras=extras, vocabulary=vocabulary, **content)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a manifest of shards: {error!r}") from None
        manifest._check(path)
        return manifest

    def _check(self, path: Path) -> None:
        """Raises ValueError if a value has a wrong type or is out of range."""
        size = self.tensor_parallel_size
        if type(size) is not int or not 1 <= size <= MOST_RANKS:
            raise ValueError(
                f"{path} must have a tensor_parallel_size from 1 to {MOST_RANKS:,}, not {size!r}"
            )
        if type(self.vocab_size) is not int or type(self.padded_vocab_size) is not int:
            raise ValueError(
                f"{path} must have integers as vocab_size and padded_vocab_size, "
                f"not {self.vocab_size!r} and {self.padded_vocab_size!r}"
            )
        if not maps_to_text(self.ties):
            raise ValueError(f"the ties of {path} must map names of tensors to names of tensors")
        for name, record in self.tensors.items():
            if (
                not _is_tuple_holding(str, record.sha256)
                or not _is_tuple_holding(str, record.stored)
                or type(record.shard) not in (dict, NoneType)
            ):
                raise ValueError(f"{path}: the record of tensor {name} is invalid: {record}")
            if len(record.sha256) != size:
                raise ValueError(
                    f"{path}: tensor {name} has {len(record.sha256)} hashes for {size} ranks"
                )
        for name, record in (*self.tensors.items(), *self.extras.items()):
            if not _is_tuple_holding(int, record.shape) or type(record.dtype) is not str:
                raise ValueError(f"{path}: the record of tensor {name} is invalid: {record}")


def _is_tuple_holding(kind: type, values: object) -> bool:
    if not isinstance(values, tuple):
        return False
    return all(type(value) is kind for value in cast(tuple[Any, ...], values))


def _lists_to_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a record, with tuples where JSON has lists."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list):
            fields[name] = tuple(cast(list[Any], value))
        else:
            fields[name] = value
    return fields


def checked_tokenizer(folder: Path, text_folder: Path) -> Tokenizer:
    """Returns the tokenizer in `text_folder` for the model in `folder`.

    Raises:
        ValueError: There is none, or a manifest records that the model was trained with another
            vocabulary.
    """
    if not text_folder.is_dir():
        raise ValueError(
            f"{text_folder} is not a folder; name a folder on this disk with a tokenizer"
        )
    if not has_tokenizer(text_folder):
        refuse_run_folder(text_folder)
    check_auxiliary_files(text_folder)
    tokenizer = load_tokenizer(text_folder)
    if not (folder / MANIFEST).exists():
        return tokenizer
    trained_with = Manifest.read(folder).vocabulary
    if trained_with is not None and not trained_with.begins(tokenizer):
        found = Vocabulary.from_tokenizer(tokenizer)
        raise ValueError(
            f"the tokenizer in {text_folder} has another vocabulary ({found}) than the one that "
            f"the model in {folder} was trained with ({trained_with}); use that run's tokenizer"
        )
    return tokenizer
