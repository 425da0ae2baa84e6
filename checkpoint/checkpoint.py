"""Opens a checkpoint folder of any supported format and lists its tensors, without reading the tensors' bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from ..files.safe_paths import checked_file
from ..files.strict_json import maps_to_text, read_folder_json, read_json_object
from .folder_files import CONFIG, check_companions, stage_files
from .formats.dcp import is_dcp, open_dcp
from .formats.megatron import TRACKER, SavedRun, reader_of
from .manifest import MANIFEST, Manifest
from .safetensors_header import read_header
from .stored_tensor import StoredTensor, index_by_name, pieces

Kind = Literal["huggingface", "shards", "legacy", "megatron", "dcp"]

EXTRAS = "extras.safetensors"
# Files of tensor-parallel ranks: those of the original GLM and of DeepSpeed, and those of FlagAI.
LEGACY_FILES = (
    re.compile(r"mp_rank_(\d{2,})_model_states\.pt"),
    re.compile(r"pytorch_model_(\d+)\.bin"),
)
TRACKERS = ("latest", TRACKER)
UNIVERSAL = "latest_universal"  # names the newest folder of DeepSpeed's universal checkpoint
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint folder, its configuration, and its manifest.

    Attributes:
        kind: "huggingface"; "shards" for shardzoo's folders and training checkpoints; "legacy" for files of
            tensor-parallel ranks by the original GLM, DeepSpeed or FlagAI; "megatron" for Megatron-LM and
            its descendants; "dcp" for `torch.distributed.checkpoint`.
        config: The contents of `config.json`, or None without such a file.
        ranks: For each tensor-parallel rank, its tensors by name. A Hugging Face folder has one rank.
        extras: Tensors that are not parameters of the model; only for "shards".
        manifest: The contents of `manifest.json`; only for "shards".
        saved: What is known about the program that wrote it; only for "megatron".
    """

    kind: Kind
    folder: Path
    config: Mapping[str, Any] | None
    ranks: tuple[Mapping[str, StoredTensor], ...]
    extras: Mapping[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    manifest: Manifest | None = None
    saved: SavedRun | None = None

    def tensors(self) -> Iterator[StoredTensor]:
        """Yields all tensors of all files."""
        for tensors in (*self.ranks, self.extras):
            yield from tensors.values()

    @property
    def files(self) -> list[Path]:
        return list(
            dict.fromkeys(chunk.file for tensor in self.tensors() for _, chunk in pieces(tensor))
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def description(self) -> str:
        size = len(self.ranks)
        if (saved := self.saved) is not None:
            return f"{saved.tool} checkpoint, {size} x {saved.stages} (tensor-parallel x pipeline) ranks"
        return {
            "huggingface": "Hugging Face folder",
            "dcp": "torch.distributed.checkpoint folder",
            "shards": f"shardzoo folder of {size} {'rank' if size == 1 else 'ranks'}",
            "legacy": f"{size} mp_rank {'file' if size == 1 else 'files'}",
        }[self.kind]


def open_checkpoint(folder: Path, config_file: Path | None = None) -> Checkpoint:
    """Detects the format of a checkpoint folder and reads the headers of its files.

    Raises ValueError, naming file and tensor, if a file is missing, damaged or inconsistent; of a training checkpoint
    also if its configuration, manifest or tokenizer has changed since it was written. `config_file` is a
    `config.json`, or its folder, to use instead of the one in `folder`.
    """
    if not folder.is_dir():
        raise ValueError(f"the folder {folder} does not exist")
    check_companions(folder, () if config_file is None else (CONFIG,))
    if (folder / MANIFEST).is_symlink() or (folder / MANIFEST).exists():
        return _open_shards(folder, config_file)
    if any((folder / name).exists() for name in WEIGHT_FILES):
        return _open_huggingface(folder, config_file)
    if (files_in := _folder_of_ranks(folder)) is not None:
        if is_dcp(files_in):
            return _open_dcp(folder, files_in, config_file)
        return (_open_megatron if reader_of(files_in) else _open_legacy)(
            folder, files_in, config_file
        )
    if (folder / UNIVERSAL).exists():
        raise ValueError(
            f"{folder} is a universal checkpoint of DeepSpeed, which is written, but not read"
        )
    if any(folder.glob("rank_*.safetensors*")):
        raise ValueError(f"{folder} has no {MANIFEST}: it is not a complete folder of shards")
    raise ValueError(
        f"{folder} has no weights: it must contain one of {MANIFEST}, {', '.join(WEIGHT_FILES)}, "
        f"mp_rank_XX_model_states.pt, pytorch_model_XX.bin, {TRACKER}, mp_rank_XX/model_optim_rng.pt"
    )


def _config(folder: Path, config_file: Path | None) -> Mapping[str, Any] | None:
    if config_file is not None:
        return read_json_object(config_file / CONFIG if config_file.is_dir() else config_file)
    return read_folder_json(folder, CONFIG)


def _open_huggingface(folder: Path, config_file: Path | None) -> Checkpoint:
    config = _config(folder, config_file)
    for single, index in (WEIGHT_FILES[:2], WEIGHT_FILES[2:]):
        if (folder / single).exists():
            tensors = index_by_name(_read_weights(checked_file(folder, single)))
            return Checkpoint("huggingface", folder, config, (tensors,))
        if (folder / index).exists():
            return Checkpoint(
                "huggingface", folder, config, (_read_indexed(folder, checked_file(folder, index)),)
            )
    raise AssertionError("open_checkpoint found one of the files")


def _read_weights(path: Path, ranks: int | None = None) -> list[StoredTensor]:
    """Reads the tensors of one file of weights; `ranks` is the number of rank files, if it is one of those."""
    if path.suffix == ".safetensors":
        return read_header(path)[0]
    from .formats.torch_file import (
        load_without_storage,
        locate_tensors,
    )  # torch takes seconds to import

    state = load_without_storage(path)
    whole = cast(dict[Any, Any], state) if isinstance(state, dict) else {}
    if isinstance(whole.get("module"), dict):
        written = whole.get("mp_world_size")
        if ranks is not None and type(written) is int and written != ranks:
            raise ValueError(
                f"{path} was written by {written} tensor-parallel ranks, but the number of rank files is {ranks}"
            )
        state = whole["module"]
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not named tensors")
    return list(locate_tensors(path, cast(dict[Any, Any], state)).values())


def _read_indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not maps_to_text(weight_map):
        raise ValueError(f"{index} must have a weight_map of tensor names to file names")
    suffix = ".bin" if index.name.startswith("pytorch") else ".safetensors"
    tensors: list[StoredTensor] = []
    for file in dict.fromkeys(weight_map.values()):
        if not file.endswith(suffix):
            raise ValueError(f"{index} names the file {file!r}, which is not a {suffix} file")
        tensors += _read_weights(checked_file(folder, file))
    found = index_by_name(tensors)
    for name, file in weight_map.items():
        if name not in found:
            raise ValueError(
                f"{index} says that tensor {name} is in {file}, which does not have it"
            )
        if found[name].file.name != file:
            raise ValueError(
                f"{index} says that tensor {name} is in {file}, but it is in {found[name].file.name}"
            )
    if unlisted := sorted(found.keys() - weight_map.keys()):
        raise ValueError(f"{found[unlisted[0]]} is not listed in {index}")
    return found


def _open_shards(folder: Path, config_file: Path | None) -> Checkpoint:
    manifest = Manifest.read(folder)
    ranks: list[dict[str, StoredTensor]] = []
    for rank in range(manifest.tensor_parallel_size):
        path, *others = stage_files(folder, f"rank_{rank:02d}.safetensors")
        tensors = index_by_name(
            [tensor for file in (path, *others) for tensor in read_header(file)[0]]
        )
        if missing := sorted(manifest.tensors.keys() - tensors.keys()):
            raise ValueError(f"{path} lacks tensor {missing[0]} of the manifest")
        if unknown := sorted(tensors.keys() - manifest.tensors.keys()):
            raise ValueError(f"{path} has tensor {unknown[0]}, which the manifest does not list")
        ranks.append(tensors)
    extras: dict[str, StoredTensor] = {}
    if manifest.extras:
        path = checked_file(folder, EXTRAS)
        extras = index_by_name(read_header(path)[0])
        if extras.keys() != manifest.extras.keys():
            raise ValueError(
                f"{path} does not contain exactly the extra tensors that the manifest lists"
            )
    return Checkpoint(
        "shards", folder, _config(folder, config_file), tuple(ranks), extras, manifest
    )


def _folder_of_ranks(folder: Path) -> Path | None:
    """Returns the folder with the rank files: `folder`, or the one that a tracker file names; None without any."""
    if (
        is_dcp(folder)
        or reader_of(folder)
        or any(
            pattern.fullmatch(entry.name) for entry in folder.iterdir() for pattern in LEGACY_FILES
        )
    ):
        return folder
    for tracker in TRACKERS:
        if (folder / tracker).exists():
            with checked_file(folder, tracker).open("rb") as file:
                tag = file.read(256).decode(errors="replace").strip()
            if not tag or "/" in tag or "\0" in tag or tag in (".", ".."):
                raise ValueError(
                    f"{folder / tracker} names {tag!r}, which is not the name of a folder beside it"
                )
            for name in (tag, f"iter_{tag:0>7}"):
                if (folder / name).is_dir() and (
                    folder / name
                ).resolve().parent == folder.resolve():
                    return folder / name
            raise ValueError(f"{folder / tracker} names the folder {tag!r}, which does not exist")
    return None


def _open_legacy(folder: Path, files_in: Path, config_file: Path | None) -> Checkpoint:
    names = [entry.name for entry in files_in.iterdir()]
    found = (
        {int(match[1]): match.string for match in map(pattern.fullmatch, names) if match}
        for pattern in LEGACY_FILES
    )
    by_rank = next(filter(None, found), dict[int, str]())
    size = len(by_rank)
    if sorted(by_rank) != list(range(size)) or not by_rank:
        raise ValueError(
            f"{files_in} has rank files {sorted(by_rank)}; it must have one for each rank, numbered from 0 without gaps"
        )
    ranks: list[dict[str, StoredTensor]] = []
    for rank in range(size):
        tensors = index_by_name(_read_weights(checked_file(files_in, by_rank[rank]), size))
        if ranks and (differing := sorted(tensors.keys() ^ ranks[0].keys())):
            raise ValueError(
                f"tensor {differing[0]} is not in both {by_rank[0]} and {by_rank[rank]} of {files_in}"
            )
        ranks.append(tensors)
    return Checkpoint("legacy", folder, _config_beside(folder, files_in, config_file), tuple(ranks))


def _open_megatron(folder: Path, files_in: Path, config_file: Path | None) -> Checkpoint:
    read = reader_of(files_in)
    assert read is not None  # the caller found one
    saved, ranks = read(files_in)
    return Checkpoint(
        "megatron", folder, _config_beside(folder, files_in, config_file), ranks, saved=saved
    )


def _open_dcp(folder: Path, files_in: Path, config_file: Path | None) -> Checkpoint:
    saved, tensors = open_dcp(files_in)
    config = _config_beside(folder, files_in, config_file)
    return Checkpoint(
        "dcp" if saved is None else "megatron", folder, config, (tensors,), saved=saved
    )


def _config_beside(
    folder: Path, files_in: Path, config_file: Path | None
) -> Mapping[str, Any] | None:
    home = next((place for place in (files_in, folder) if (place / CONFIG).exists()), folder)
    return _config(home, config_file)
