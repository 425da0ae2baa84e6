"""`manifest.json`: what a folder of shards holds, written last, so that a folder without one is incomplete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..data.files import read_folder_json
from .json_digest import add_digest, take_digest, write_durably

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TensorRecord:
    """shape: full and unpadded. shard: the fields of its `Shard`, None if replicated. sha256: one for each rank.

    dtype: torch's name of it.
    stored: the names that the tensor, or the tensors stacked in it, had in the Hugging Face folder it came from;
        empty for today's names.
    """

    shape: tuple[int, ...]
    dtype: str
    shard: dict[str, Any] | None
    sha256: tuple[str, ...]
    stored: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExtraRecord:
    """A tensor of the Hugging Face folder that is no parameter, kept as it is in `extras.safetensors`."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """model_type: the family. vocab_size, padded_vocab_size: true, and as stored over all ranks.

    ties: tensors of the Hugging Face folder that repeat another one -> that one's name there.
    extras: what `extras.safetensors` holds.
    """

    model_type: str
    tensor_parallel_size: int
    vocab_size: int
    padded_vocab_size: int
    tensors: dict[str, TensorRecord]
    ties: dict[str, str] = field(default_factory=dict)
    extras: dict[str, ExtraRecord] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(add_digest({"format_version": FORMAT_VERSION, **asdict(self)}), indent=1)

    def write(self, folder: Path) -> None:
        """Durably, under another name first."""
        write_durably(folder / MANIFEST, self.to_json())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """ValueError if the folder has no manifest, a damaged one, or one that this version cannot read."""
        path = folder / MANIFEST
        content = read_folder_json(folder, MANIFEST)
        if content is None:
            raise ValueError(f"{folder} has no {MANIFEST}: it is not a complete folder of shards")
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"{path} has format version {version}; this version reads {FORMAT_VERSION}")
        take_digest(content, path)
        try:
            del content["format_version"]
            tensors = {name: _record(TensorRecord, record) for name, record in content.pop("tensors").items()}
            extras = {name: _record(ExtraRecord, record) for name, record in content.pop("extras").items()}
            manifest = cls(tensors=tensors, extras=extras, **content)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a manifest of shards: {error!r}") from None
        manifest._check(path)
        return manifest

    def _check(self, path: Path) -> None:
        size = self.tensor_parallel_size
        if type(size) is not int or not 1 <= size <= 100_000:
            raise ValueError(f"{path} has a tensor_parallel_size of {size!r}")
        if type(self.vocab_size) is not int or type(self.padded_vocab_size) is not int:
            raise ValueError(f"{path} has vocabulary sizes {self.vocab_size!r} and {self.padded_vocab_size!r}")
        if not isinstance(self.ties, dict) or not all(isinstance(kept, str) for kept in self.ties.values()):
            raise ValueError(f"{path} has ties that are no names of tensors")
        for name, record in self.tensors.items():
            digests, stored = record.sha256, record.stored
            if not _are(str, digests) or not _are(str, stored) or not isinstance(record.shard, dict | None):
                raise ValueError(f"{path}: the record of tensor {name} is none: {record}")
            if len(digests) != size:
                raise ValueError(f"{path}: tensor {name} has {len(digests)} hashes for {size} ranks")
            if record.shard is None and len(set(digests)) > 1:
                raise ValueError(f"{path}: tensor {name} is the same on all ranks, but has {len(set(digests))} hashes")
        for name, record in (*self.tensors.items(), *self.extras.items()):
            if not _are(int, record.shape) or not isinstance(record.dtype, str):
                raise ValueError(f"{path}: the record of tensor {name} is none: {record}")


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is kind for value in values)


def _record(kind: type, values: Mapping[str, Any]) -> Any:
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
