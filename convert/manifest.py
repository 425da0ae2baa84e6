"""`manifest.json`: what a folder of shards holds, written last, so that a folder without one is incomplete."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TensorRecord:
    """shape: full and unpadded. shard: the fields of its `Shard`, None if replicated. sha256: one for each rank."""

    shape: tuple[int, ...]
    dtype: str
    shard: dict[str, Any] | None
    sha256: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """model_type: the family. vocab_size, padded_vocab_size: true, and as stored over all ranks."""

    model_type: str
    tensor_parallel_size: int
    vocab_size: int
    padded_vocab_size: int
    tensors: dict[str, TensorRecord]

    def write(self, folder: Path) -> None:
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        partial = folder / f"{MANIFEST}.partial"
        with partial.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """ValueError if the folder has no manifest, or one that this version cannot read."""
        path = folder / MANIFEST
        if not path.exists():
            raise ValueError(f"{folder} has no {MANIFEST}: it is not a complete folder of shards")
        try:
            content = json.loads(path.read_text())
            version = content.pop("format_version")
            if version != FORMAT_VERSION:
                raise ValueError(f"{path} has format version {version}; this version reads {FORMAT_VERSION}")
            tensors = {name: TensorRecord(**record) for name, record in content.pop("tensors").items()}
            return cls(tensors=tensors, **content)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a manifest of shards: {error!r}") from None
