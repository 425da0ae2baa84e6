"""Opens a checkpoint folder, whatever its format, and lists its tensors; their bytes stay where they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..data.files import checked_file, read_folder_json, read_json_object
from .folder_files import CONFIG
from .manifest import MANIFEST, Manifest
from .safetensors_header import read_header
from .stored_tensor import StoredTensor, only_names_once

Kind = Literal["huggingface", "shards", "legacy"]

EXTRAS = "extras.safetensors"
# Files of tensor-parallel ranks: the original GLM's and DeepSpeed's, and FlagAI's.
LEGACY_FILES = (re.compile(r"mp_rank_(\d{2,})_model_states\.pt"), re.compile(r"pytorch_model_(\d+)\.bin"))
LEGACY_TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class Checkpoint:
    """A folder's tensors and what lies beside them.

    Args:
        kind: "huggingface"; "shards", shardzoo's folders and training checkpoints; "legacy", files of tensor-parallel
            ranks by the original GLM, DeepSpeed or FlagAI.
        folder: Where it lies.
        config: The contents of `config.json`; None without one.
        ranks: Each tensor-parallel rank's tensors by name; one rank for Hugging Face folders.
        extras: Of shards only: tensors that are no parameters.
        manifest: Of shards only.
    """

    kind: Kind
    folder: Path
    config: Mapping[str, Any] | None
    ranks: tuple[Mapping[str, StoredTensor], ...]
    extras: Mapping[str, StoredTensor] = field(default_factory=dict)
    manifest: Manifest | None = None

    def tensors(self) -> Iterator[StoredTensor]:
        """All tensors of all files."""
        for tensors in (*self.ranks, self.extras):
            yield from tensors.values()

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(tensor.file for tensor in self.tensors()))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def description(self) -> str:
        size = len(self.ranks)
        return {
            "huggingface": "Hugging Face folder",
            "shards": f"shardzoo folder of {size} {'rank' if size == 1 else 'ranks'}",
            "legacy": f"{size} mp_rank {'file' if size == 1 else 'files'}",
        }[self.kind]


def open_checkpoint(folder: Path, config_file: Path | None = None) -> Checkpoint:
    """Finds out a folder's format and reads its headers.

    Args:
        folder: The checkpoint.
        config_file: A `config.json` to use instead of the folder's own.

    Raises:
        ValueError: anything is amiss; the message names file and tensor.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if (folder / MANIFEST).is_symlink() or (folder / MANIFEST).exists():
        return _open_shards(folder, config_file)
    if any((folder / name).exists() for name in WEIGHT_FILES):
        return _open_huggingface(folder, config_file)
    if (legacy := _legacy_folder(folder)) is not None:
        return _open_legacy(folder, legacy, config_file)
    if any(folder.glob("rank_*.safetensors*")):
        raise ValueError(f"{folder} has no {MANIFEST}: it is not a complete folder of shards")
    raise ValueError(
        f"{folder} has no weights: none of {MANIFEST}, {', '.join(WEIGHT_FILES)}, mp_rank_XX_model_states.pt"
    )


def _config(folder: Path, config_file: Path | None) -> Mapping[str, Any] | None:
    if config_file is not None:
        return read_json_object(config_file / CONFIG if config_file.is_dir() else config_file)
    return read_folder_json(folder, CONFIG)


def _open_huggingface(folder: Path, config_file: Path | None) -> Checkpoint:
    config = _config(folder, config_file)
    for single, index in (WEIGHT_FILES[:2], WEIGHT_FILES[2:]):
        if (folder / single).exists():
            tensors = only_names_once(_read_weights(checked_file(folder, single)))
            return Checkpoint("huggingface", folder, config, (tensors,))
        if (folder / index).exists():
            return Checkpoint("huggingface", folder, config, (_read_indexed(folder, checked_file(folder, index)),))
    raise AssertionError("open_checkpoint saw one of the files")


def _read_weights(path: Path, ranks: int | None = None) -> list[StoredTensor]:
    """ranks: how many files of tensor-parallel ranks there are."""
    if path.suffix == ".safetensors":
        return read_header(path)[0]
    from .torch_file import load_without_storage, locate_tensors  # torch takes seconds to import

    state = load_without_storage(path)
    if isinstance(state, dict) and isinstance(state.get("module"), dict):
        written = state.get("mp_world_size")
        if ranks is not None and type(written) is int and written != ranks:
            raise ValueError(f"{path} was written by {written} tensor-parallel ranks, but there are files of {ranks}")
        state = state["module"]
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not named tensors")
    return list(locate_tensors(path, state).values())


def _read_indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} must have a weight_map of tensor names to file names")
    suffix = ".bin" if index.name.startswith("pytorch") else ".safetensors"
    tensors: list[StoredTensor] = []
    for file in dict.fromkeys(weight_map.values()):
        if not file.endswith(suffix):
            raise ValueError(f"{index} names the file {file!r}, which is no {suffix} file")
        tensors += _read_weights(checked_file(folder, file))
    found = only_names_once(tensors)
    for name, file in weight_map.items():
        if name not in found:
            raise ValueError(f"{index} says that tensor {name} is in {file}, which does not have it")
        if found[name].file.name != file:
            raise ValueError(f"{index} says that tensor {name} is in {file}, but it is in {found[name].file.name}")
    if unlisted := sorted(found.keys() - weight_map.keys()):
        raise ValueError(f"{found[unlisted[0]]} is not listed in {index}")
    return found


def _open_shards(folder: Path, config_file: Path | None) -> Checkpoint:
    manifest = Manifest.read(folder)
    ranks = []
    for rank in range(manifest.tensor_parallel_size):
        path = checked_file(folder, f"rank_{rank:02d}.safetensors")
        tensors = only_names_once(read_header(path)[0])
        if missing := sorted(manifest.tensors.keys() - tensors.keys()):
            raise ValueError(f"{path} lacks tensor {missing[0]} of the manifest")
        if unknown := sorted(tensors.keys() - manifest.tensors.keys()):
            raise ValueError(f"{path} has tensor {unknown[0]}, which the manifest does not know")
        ranks.append(tensors)
    extras: dict[str, StoredTensor] = {}
    if manifest.extras:
        path = checked_file(folder, EXTRAS)
        extras = only_names_once(read_header(path)[0])
        if extras.keys() != manifest.extras.keys():
            raise ValueError(f"{path} does not hold the tensors that the manifest lists")
    return Checkpoint("shards", folder, _config(folder, config_file), tuple(ranks), extras, manifest)


def _legacy_folder(folder: Path) -> Path | None:
    """Where the files of ranks are: here, or in the folder that a tracker file names."""
    if any(pattern.fullmatch(entry.name) for entry in folder.iterdir() for pattern in LEGACY_FILES):
        return folder
    for tracker in LEGACY_TRACKERS:
        if (folder / tracker).exists():
            with checked_file(folder, tracker).open("rb") as file:
                tag = file.read(256).decode(errors="replace").strip()
            if not tag or "/" in tag or "\0" in tag or tag in (".", ".."):
                raise ValueError(f"{folder / tracker} names {tag!r}, which is no folder of a checkpoint")
            for name in (tag, f"iter_{tag:0>7}"):
                if (folder / name).is_dir() and (folder / name).resolve().parent == folder.resolve():
                    return folder / name
            raise ValueError(f"{folder / tracker} names {tag!r}, but there is no such folder")
    return None


def _open_legacy(folder: Path, files_in: Path, config_file: Path | None) -> Checkpoint:
    names = [entry.name for entry in files_in.iterdir()]
    found = (
        {int(match[1]): match.string for match in map(pattern.fullmatch, names) if match} for pattern in LEGACY_FILES
    )
    by_rank = next(filter(None, found), {})
    size = len(by_rank)
    if sorted(by_rank) != list(range(size)) or not by_rank:
        raise ValueError(f"{files_in} has files of ranks {sorted(by_rank)}; ranks must be 0 to {size - 1}, each once")
    ranks: list[dict[str, StoredTensor]] = []
    for rank in range(size):
        tensors = only_names_once(_read_weights(checked_file(files_in, by_rank[rank]), size))
        if ranks and (differing := sorted(tensors.keys() ^ ranks[0].keys())):
            raise ValueError(f"tensor {differing[0]} is not in both {by_rank[0]} and {by_rank[rank]} of {files_in}")
        ranks.append(tensors)
    home = next((place for place in (files_in, folder) if (place / CONFIG).exists()), folder)
    return Checkpoint("legacy", folder, _config(home, config_file), tuple(ranks))
