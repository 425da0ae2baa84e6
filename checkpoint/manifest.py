"""`manifest.json`: what a folder of shards holds, written last, so that a folder without one is incomplete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .strict_json import read_json_object

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
        content = json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}))
        return json.dumps({**content, "sha256": _digest(content)}, indent=1)

    def write(self, folder: Path) -> None:
        """Durably, under another name first."""
        partial = folder / f"{MANIFEST}.partial"
        with partial.open("w") as file:
            file.write(self.to_json())
            file.flush()
            os.fsync(file.fileno())
        partial.rename(folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """ValueError if the folder has no manifest, a damaged one, or one that this version cannot read."""
        path = folder / MANIFEST
        if not path.exists():
            raise ValueError(f"{folder} has no {MANIFEST}: it is not a complete folder of shards")
        content = read_json_object(path)
        digest = content.pop("sha256", None)
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"{path} has format version {version}; this version reads {FORMAT_VERSION}")
        if digest != _digest(content):
            raise ValueError(f"{path} is damaged: its contents do not match its own sha256")
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
        for name, record in self.tensors.items():
            if len(record.sha256) != size:
                raise ValueError(f"{path}: tensor {name} has {len(record.sha256)} hashes for {size} ranks")


def _record(kind: type, values: Mapping[str, Any]) -> Any:
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
