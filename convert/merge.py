"""Merges a folder of shards into a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ..models.auto import family, from_config
from ..models.common.name_map import Entry
from .manifest import MANIFEST, Manifest
from .sharded import ShardedReader

NOT_COPIED = {MANIFEST, "trainer_state.json"}


def merge(source: Path, destination: Path) -> None:
    """Writes what `transformers.AutoModel…from_pretrained(destination)` loads.

    source: a folder with `config.json`, `rank_XX.safetensors` and `manifest.json`; a training checkpoint is one.
    destination: a folder that does not exist or is empty. The tokenizer's and other small files travel along.
    """
    if destination.exists() and any(destination.iterdir()):
        raise ValueError(f"{destination} is not empty; name a new folder")
    manifest = Manifest.read(source)
    config = family(manifest.model_type).Config.from_dict(json.loads((source / "config.json").read_text()))
    model = from_config(config, device="meta")
    parameters = dict(model.named_parameters())
    shards = {name: getattr(parameter, "shard", None) for name, parameter in parameters.items()}
    reader = ShardedReader(source, "rank", manifest.tensor_parallel_size, shards)
    tensors: dict[str, Tensor] = {}
    for native, entry in zip(parameters, family(manifest.model_type).NAME_MAP.resolve(parameters), strict=True):
        tensors |= _stored_tensors(entry, reader.full(native))
    destination.mkdir(parents=True, exist_ok=True)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name not in NOT_COPIED:
            shutil.copy2(file, destination)


def _stored_tensors(entry: Entry, full: Tensor) -> dict[str, Tensor]:
    full = full.t() if entry.transpose else full
    names = entry.stored_names()
    pieces = full.chunk(len(names)) if len(names) > 1 else (full,)
    return {name: piece.contiguous() for name, piece in zip(names, pieces, strict=True)}
