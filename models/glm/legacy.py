"""Checkpoints of the original GLM that are no Hugging Face folders.

- Its authors': `mp_rank_XX_model_states.pt`, one for each of any number of tensor-parallel ranks, in the folder or in
  the one that its `latest` or `latest_checkpointed_iteration.txt` names; the weights are the file's `module`.
- FlagAI's: `pytorch_model.bin`, or `pytorch_model_XX.bin` of several ranks, with or without a `module`.

The files are read with `weights_only=True`. What else they hold (random states, optimizer and scheduler) is made of a
few known types, in whose place an inert object is built; a file with any other type is refused. No code of a file runs.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.torch_file import only_placeholder_types
from ..auto import read_config
from ..files import StoredTensor, located_tensors
from ..placement import Part, Placement, check_shape, parameter_layout
from .config import GLMConfig
from .hf import NAME_MAP

_RANK_FILES = (re.compile(r"mp_rank_(\d+)_model_states\.pt"), re.compile(r"pytorch_model_(\d+)\.bin"))
_HUGGING_FACE_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
_HEAD_SIZE = 64  # of every release; a checkpoint does not tell


def legacy_files(folder: Path) -> list[Path]:
    """The files of a legacy checkpoint in rank order; empty if the folder is none, or a Hugging Face folder.

    A single `pytorch_model.bin` is one if its `config.json` has the original GLM's keys. ValueError if a rank's file is
    missing.
    """
    single = folder / "pytorch_model.bin"
    if any((folder / name).exists() for name in _HUGGING_FACE_FILES):
        return []  # whatever a trainer left beside it
    if single.exists():
        return [single] if _stored_config(folder) else []
    for pattern in _RANK_FILES:
        found = {int(match[1]): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
        if absent := sorted(set(range(max(found, default=-1) + 1)) - found.keys()):
            raise ValueError(f"{folder} has files of ranks {sorted(found)} but none of rank {absent[0]}")
        if found:
            return [found[rank] for rank in range(len(found))]
    for tracker in _TRACKERS:
        if (folder / tracker).is_file():
            tag = (folder / tracker).read_text().strip()
            if tag in ("", ".", "..") or Path(tag).name != tag or not (folder / tag).is_dir():
                raise ValueError(f"{folder / tracker} names {tag!r}, which is no folder beside it")
            return legacy_files(folder / tag)
    return []


def legacy_config(files: list[Path], ranks: list[dict[str, StoredTensor]]) -> GLMConfig:
    """Of the `config.json` beside the files, or of the folder above; without one, what the tensors tell."""
    for folder in (files[0].parent, files[0].parent.parent):
        if values := _stored_config(folder):
            return GLMConfig.from_dict(values)
    return infer_config(ranks)


def _stored_config(folder: Path) -> dict[str, Any]:
    """Of an original GLM, whether it names its `model_type` or not; else empty."""
    path = folder / "config.json"
    values = read_config(path) if path.is_file() else {}
    is_glm = values.get("model_type", "glm") == "glm" and "block_position_encoding" in values
    return values if is_glm else {}


def read_ranks(files: list[Path]) -> list[dict[str, StoredTensor]]:
    """Each rank's tensors by the names of the name map. ValueError if a file is damaged or not one of these ranks."""
    return [_read(path, len(files)) for path in files]


def infer_config(ranks: list[dict[str, StoredTensor]]) -> GLMConfig:
    """The sizes that tensors tell; the number of heads is that of every release, one for 64 hidden units."""
    try:
        embeddings = [tensors["word_embeddings.weight"] for tensors in ranks]
        positions = ranks[0]["transformer.position_embeddings.weight"].shape[0]
    except KeyError as error:
        raise ValueError(f"the checkpoint lacks {error.args[0]}: it is not of the original GLM") from None
    hidden_size = embeddings[0].shape[1]
    layers = {int(match[1]) for name in ranks[0] if (match := re.match(r"transformer\.layers\.(\d+)\.", name))}
    if hidden_size % _HEAD_SIZE:
        raise ValueError(
            f"a hidden size of {hidden_size} is not made of heads of {_HEAD_SIZE}, as in every release; pass `config`"
        )
    return GLMConfig(
        vocab_size=sum(tensor.shape[0] for tensor in embeddings),
        num_layers=max(layers, default=-1) + 1,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // _HEAD_SIZE,
        max_sequence_length=positions - 1,
    )


def place_legacy(model: nn.Module, ranks: list[dict[str, StoredTensor]]) -> list[Placement]:
    """Where each parameter's parts are, for files of any number of ranks. Their vocabulary is split without padding.

    ValueError naming every tensor that is missing, of no parameter, or of a shape that does not fit.
    """
    layout = parameter_layout(model)
    entries = [NAME_MAP.match(layout, tensors) for tensors in ranks][0].entries  # noqa: RUF015 - all are checked
    placements: list[Placement] = []
    problems: list[str] = []
    for name, (shape, padded) in layout.items():
        (stored,) = entries[name].stored_names()
        shard = replace(padded, pad_multiple=0) if padded else None
        parts = []
        for rank, tensors in enumerate(ranks if shard else ranks[:1]):
            check_shape(tensors[stored], shard.local_shape(len(ranks)) if shard else shape, name, problems)
            position = 0
            for start, stop in shard.ranges(rank, len(ranks)) if shard else [(0, shape[0])]:
                parts.append(Part(tensors[stored], start, stop, position))
                position += stop - start
        placements.append(Placement(name, shape, padded, tuple(parts)))
    if problems:
        raise ValueError("; ".join(problems))
    return placements


def _read(path: Path, ranks: int) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
        with only_placeholder_types():
            state = torch.load(path, map_location="meta" if zipped else "cpu", mmap=zipped, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{path} holds a {foreign[1]}, which is not among the few types that are read from a checkpoint; "
                "save its `module` alone"
            ) from None
        raise ValueError(f"{path} is no readable file of tensors") from error
    module = _module(path, state, ranks)
    return {NAME_MAP.todays_name(tensor.name, ()): tensor for tensor in located_tensors(path, module, zipped)}


def _module(path: Path, state: Any, ranks: int) -> Mapping[str, Tensor]:
    if isinstance(state, dict) and isinstance(state.get("module"), dict):
        written = state.get("mp_world_size")
        if isinstance(written, int) and written != ranks:
            raise ValueError(f"{path} was written by {written} tensor-parallel ranks, but there are files of {ranks}")
        state = state["module"]
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{path} must hold named tensors, or a `module` of them and nothing else in it")
    return state
