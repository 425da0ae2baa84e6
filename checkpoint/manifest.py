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
from .folder_files import check_companions

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TensorRecord:
    """A parameter in a folder of shards.

    Attributes:
        shape: The full shape without padding.
        dtype: PyTorch's name of the type.
        shard: The fields of its `Shard`, or None if it is replicated.
        sha256: One digest for each rank.
        stored: The names in the Hugging Face folder that it came from; empty if they were the current names.
    """

    shape: tuple[int, ...]
    dtype: str
    shard: dict[str, Any] | None
    sha256: tuple[str, ...]
    stored: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExtraRecord:
    """A tensor of the Hugging Face folder that is not a parameter; `extras.safetensors` keeps it unchanged."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder of shards.

    Attributes:
        padded_vocab_size: The vocabulary size as stored, over all ranks.
        tensors: The parameters by native name.
        ties: Name of a tensor of the Hugging Face folder that repeats another one -> name of that other tensor.
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
        """Reads the manifest of a folder. ValueError if it is missing, damaged, or of an unsupported format version."""
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
            tensors = {
                name: _record(TensorRecord, record)
                for name, record in content.pop("tensors").items()
            }
            extras = {
                name: _record(ExtraRecord, record) for name, record in content.pop("extras").items()
            }
            recorded = content.pop("vocabulary", None)
            vocabulary = None if recorded is None else Vocabulary.from_json(recorded, str(path))
            manifest = cls(tensors=tensors, extras=extras, vocabulary=vocabulary, **content)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a manifest of shards: {error!r}") from None
        manifest._check(path)
        return manifest

    def _check(self, path: Path) -> None:
        size = self.tensor_parallel_size
        if type(size) is not int or not 1 <= size <= 100_000:
            raise ValueError(
                f"{path} must have a tensor_parallel_size from 1 to 100,000, not {size!r}"
            )
        if type(self.vocab_size) is not int or type(self.padded_vocab_size) is not int:
            sizes = f"{self.vocab_size!r} and {self.padded_vocab_size!r}"
            raise ValueError(
                f"{path} must have integers as vocab_size and padded_vocab_size, not {sizes}"
            )
        if not maps_to_text(self.ties):
            raise ValueError(f"the ties of {path} must map names of tensors to names of tensors")
        for name, record in self.tensors.items():
            digests, stored = record.sha256, record.stored
            if (
                not _are(str, digests)
                or not _are(str, stored)
                or type(record.shard) not in (dict, NoneType)
            ):
                raise ValueError(f"{path}: the record of tensor {name} is invalid: {record}")
            if len(digests) != size:
                raise ValueError(
                    f"{path}: tensor {name} has {len(digests)} hashes for {size} ranks"
                )
        for name, record in (*self.tensors.items(), *self.extras.items()):
            if not _are(int, record.shape) or type(record.dtype) is not str:
                raise ValueError(f"{path}: the record of tensor {name} is invalid: {record}")


def _are(kind: type, values: object) -> bool:
    return isinstance(values, tuple) and all(
        type(value) is kind for value in cast(tuple[Any, ...], values)
    )


def _record(kind: type, values: Mapping[str, Any]) -> Any:
    return kind(
        **{
            name: tuple(cast(list[Any], value)) if isinstance(value, list) else value
            for name, value in values.items()
        }
    )


def checked_tokenizer(folder: Path, text_folder: Path) -> Tokenizer:
    """Returns the tokenizer in `text_folder` for the model in `folder`.

    Raises ValueError if there is none, or if a manifest records that the model was trained with another vocabulary.
    """
    if not text_folder.is_dir():
        raise ValueError(
            f"{text_folder} is not a folder; name a folder on this disk with a tokenizer"
        )
    if (text_folder / "checkpoints").is_dir() and not has_tokenizer(text_folder):
        raise ValueError(
            f"{text_folder} is a run's folder; name a model in it: {text_folder}/hf, or one of its checkpoints"
        )
    check_companions(text_folder)
    tokenizer = load_tokenizer(text_folder)
    trained_with = Manifest.read(folder).vocabulary if (folder / MANIFEST).exists() else None
    if trained_with is not None and not trained_with.begins(tokenizer):
        found = Vocabulary.from_tokenizer(tokenizer)
        raise ValueError(
            f"the tokenizer in {text_folder} has another vocabulary ({found}) than the one that the "
            f"model in {folder} was trained with ({trained_with}); use that run's tokenizer"
        )
    return tokenizer
