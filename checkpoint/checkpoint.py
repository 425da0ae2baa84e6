"""Opens a checkpoint folder of any supported format and lists its tensors.

Only headers are read, never the bytes of tensors. This file also reads the Hugging Face folders,
shardzoo's folders of shards, and the rank files of the original GLM, DeepSpeed and FlagAI; the
formats of Megatron-LM and of `torch.distributed.checkpoint` have files of their own in `formats/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from ..files.safe_paths import checked_file
from ..files.strict_json import maps_to_text, read_folder_json, read_json_object
from .folder_files import (
    CONFIG,
    check_auxiliary_files,
    find_stage_files,
    refuse_adapter_folder,
    refuse_run_folder,
)
from .formats.dcp import is_dcp, open_dcp
from .formats.megatron import TRACKER, SavedRun, find_reader
from .formats.universal import UNIVERSAL, UniversalState, open_universal
from .manifest import MANIFEST, Manifest
from .safetensors_header import read_header
from .stored_tensor import StoredTensor, index_by_name, list_chunks, read_file_state

Kind = Literal["huggingface", "shards", "legacy", "megatron", "dcp"]

EXTRAS = "extras.safetensors"
# Files of tensor-parallel ranks: those of the original GLM and of DeepSpeed, and those of FlagAI.
LEGACY_FILES = (
    re.compile(r"mp_rank_(\d{2,})_model_states\.pt"),
    re.compile(r"pytorch_model_(\d+)\.bin"),
)
TRACKERS = ("latest", TRACKER)
# The files of a Hugging Face folder: for each format the single file, and the index of several.
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
        kind: "huggingface"; "shards" for shardzoo's folders and training checkpoints; "legacy" for
            files of tensor-parallel ranks by the original GLM, DeepSpeed or FlagAI; "megatron" for
            Megatron-LM and its descendants; "dcp" for `torch.distributed.checkpoint`.
        folder: The folder as the user named it.
        config: The contents of `config.json`, or None without such a file.
        ranks: For each tensor-parallel rank, its tensors by name. A Hugging Face folder has one.
        extras: Tensors that are not parameters of the model; only for "shards".
        manifest: The contents of `manifest.json`; only for "shards".
        saved: What is known about the program that wrote it; only for "megatron".
        universal: What DeepSpeed's universal checkpoint has beside the weights; such a folder is
            otherwise read like Hugging Face's.
    """

    kind: Kind
    folder: Path
    config: Mapping[str, Any] | None
    ranks: tuple[Mapping[str, StoredTensor], ...]
    extras: Mapping[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    manifest: Manifest | None = None
    saved: SavedRun | None = None
    universal: UniversalState | None = None

    def tensors(self) -> Iterator[StoredTensor]:
        """Yields all tensors of all files."""
        for tensors in (*self.ranks, self.extras):
            yield from tensors.values()

    @property
    def files(self) -> list[Path]:
        files: dict[Path, None] = {}
        for tensor in self.tensors():
            for _, chunk in list_chunks(tensor):
                files[chunk.file] = None
        return list(files)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def description(self) -> str:
        size = len(self.ranks)
        if self.saved is not None:
            return (
                f"{self.saved.tool} checkpoint, {size} x {self.saved.stages} "
                f"(tensor-parallel x pipeline) ranks"
            )
        if self.universal is not None:
            return "universal checkpoint of DeepSpeed"
        return {
            "huggingface": "Hugging Face folder",
            "dcp": "torch.distributed.checkpoint folder",
            "shards": f"shardzoo folder of {size} {'rank' if size == 1 else 'ranks'}",
            "legacy": f"{size} mp_rank {'file' if size == 1 else 'files'}",
        }[self.kind]


def open_checkpoint(folder: Path, config_file: Path | None = None) -> Checkpoint:
    """Detects the format of a checkpoint folder and reads the headers of its files.

    Args:
        folder: The folder.
        config_file: A `config.json`, or its folder, to use instead of the one in `folder`.

    Raises:
        ValueError: A file is missing, damaged or inconsistent; or the configuration, manifest or
            tokenizer of a training checkpoint has changed since it was written. The message names
            the file and the tensor.
    """
    if folder.suffix == ".gguf" and folder.is_file():
        raise ValueError(f"{folder} is a GGUF file: convert it with --dequantize bf16 first")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name the folder that holds the checkpoint")
    if not folder.is_dir():
        raise ValueError(f"the folder {folder} does not exist")
    check_auxiliary_files(folder, () if config_file is None else (CONFIG,))
    if (folder / MANIFEST).is_symlink() or (folder / MANIFEST).exists():
        return _open_shards(folder, config_file)
    if any((folder / name).exists() for name in WEIGHT_FILES):
        return _open_huggingface(folder, config_file)

    # Other programs' files may be in a folder that a tracker file names.
    universal_folder = _find_named_folder(folder, UNIVERSAL)
    if universal_folder is not None:
        weights, state = open_universal(universal_folder)
        config = _read_config(folder, config_file)
        return Checkpoint("huggingface", folder, config, (weights,), universal=state)
    rank_folder = _find_rank_folder(folder)
    if rank_folder is not None:
        return _open_rank_folder(folder, rank_folder, config_file)

    if any(folder.glob("*.gguf")):
        raise ValueError(f"{folder} holds a GGUF file: convert it with --dequantize bf16 first")
    if any(folder.glob("rank_*.safetensors*")):
        raise ValueError(f"{folder} has no {MANIFEST}: it is not a complete folder of shards")
    refuse_run_folder(folder)
    refuse_adapter_folder(folder)
    raise ValueError(
        f"{folder} has no weights: it must contain one of {MANIFEST}, {', '.join(WEIGHT_FILES)}, "
        f"mp_rank_XX_model_states.pt, pytorch_model_XX.bin, {TRACKER}, "
        f"mp_rank_XX/model_optim_rng.pt"
    )


def _read_config(folder: Path, config_file: Path | None) -> Mapping[str, Any] | None:
    """Returns the configuration in `folder`, or the one in `config_file` instead."""
    if config_file is None:
        return read_folder_json(folder, CONFIG)
    if config_file.is_dir():
        config_file = config_file / CONFIG
    return read_json_object(config_file)


def _open_shards(folder: Path, config_file: Path | None) -> Checkpoint:
    """Opens a folder of shardzoo: the manifest says which tensors there must be."""
    manifest = Manifest.read(folder)
    ranks: list[dict[str, StoredTensor]] = []
    for rank in range(manifest.tensor_parallel_size):
        paths = find_stage_files(folder, f"rank_{rank:02d}.safetensors")
        stored: list[StoredTensor] = []
        for path in paths:
            stored += read_header(path)[0]
        tensors = index_by_name(stored)
        missing = sorted(manifest.tensors.keys() - tensors.keys())
        if missing:
            raise ValueError(f"{paths[0]} lacks tensor {missing[0]} of the manifest")
        unknown = sorted(tensors.keys() - manifest.tensors.keys())
        if unknown:
            raise ValueError(
                f"{paths[0]} has tensor {unknown[0]}, which the manifest does not list"
            )
        ranks.append(tensors)
    extras: dict[str, StoredTensor] = {}
    if manifest.extras:
        path = checked_file(folder, EXTRAS)
        extras = index_by_name(read_header(path)[0])
        if extras.keys() != manifest.extras.keys():
            raise ValueError(
                f"{path} does not contain exactly the extra tensors that the manifest lists"
            )
    config = _read_config(folder, config_file)
    return Checkpoint("shards", folder, config, tuple(ranks), extras, manifest)


def _open_huggingface(folder: Path, config_file: Path | None) -> Checkpoint:
    """Opens a Hugging Face folder; safetensors files go before pickled ones."""
    config = _read_config(folder, config_file)
    for single, index in (WEIGHT_FILES[:2], WEIGHT_FILES[2:]):
        if (folder / single).exists():
            tensors = index_by_name(_read_weights(checked_file(folder, single)))
            return Checkpoint("huggingface", folder, config, (tensors,))
        if (folder / index).exists():
            tensors = _read_indexed_weights(folder, checked_file(folder, index))
            return Checkpoint("huggingface", folder, config, (tensors,))
    raise AssertionError("open_checkpoint found one of the files")


def _read_weights(path: Path, ranks: int | None = None) -> list[StoredTensor]:
    """Returns the tensors of one file of weights.

    Args:
        path: A safetensors file or one of `torch.save`.
        ranks: The number of rank files, if it is one of those.
    """
    if path.suffix == ".safetensors":
        return read_header(path)[0]
    # torch takes seconds to import, and safetensors files do without.
    from .formats.torch_file import load_without_storage, locate_tensors

    file_state = read_file_state(path)
    state = load_without_storage(path)
    if isinstance(state, dict):
        content = cast(dict[Any, Any], state)
        # DeepSpeed and FlagAI put the weights beside facts about the run.
        if isinstance(content.get("module"), dict):
            written = content.get("mp_world_size")
            if ranks is not None and type(written) is int and written != ranks:
                raise ValueError(
                    f"{path} was written by {written} tensor-parallel ranks, "
                    f"but the number of rank files is {ranks}"
                )
            state = content["module"]
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not named tensors")
    return list(locate_tensors(path, cast(dict[Any, Any], state), file_state).values())


def _read_indexed_weights(folder: Path, index: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of the files that an index names, which must hold what it says."""
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
        if name not in found and name.endswith("rotary_emb.inv_freq"):
            continue  # These frequencies are computed again, so some programs leave them out.
        if name not in found:
            raise ValueError(
                f"{index} says that tensor {name} is in {file}, which does not have it"
            )
        if found[name].file.name != file:
            raise ValueError(
                f"{index} says that tensor {name} is in {file}, "
                f"but it is in {found[name].file.name}"
            )
    unlisted = sorted(found.keys() - weight_map.keys())
    if unlisted:
        raise ValueError(f"{found[unlisted[0]]} is not listed in {index}")
    return found


def _find_rank_folder(folder: Path) -> Path | None:
    """Returns the folder with other programs' files: `folder`, or the one that a tracker names.

    Returns None if there is neither.
    """
    if is_dcp(folder) or find_reader(folder):
        return folder
    for entry in folder.iterdir():
        if any(pattern.fullmatch(entry.name) for pattern in LEGACY_FILES):
            return folder
    for tracker in TRACKERS:
        named = _find_named_folder(folder, tracker)
        if named is not None:
            return named
    return None


def _find_named_folder(folder: Path, tracker: str) -> Path | None:
    """Returns the folder that a tracker file names, or None without such a file.

    Raises:
        ValueError: The file names something that is not a folder beside it.
    """
    if not (folder / tracker).exists():
        return None
    with checked_file(folder, tracker).open("rb") as file:
        tag = file.read(256).decode(errors="replace").strip()
    if not tag or "/" in tag or "\0" in tag or tag in (".", ".."):
        raise ValueError(
            f"{folder / tracker} names {tag!r}, which is not the name of a folder beside it"
        )
    for name in (tag, f"iter_{tag:0>7}"):
        named = folder / name
        # A link to a folder elsewhere does not count.
        if named.is_dir() and named.resolve().parent == folder.resolve():
            return named
    raise ValueError(f"{folder / tracker} names the folder {tag!r}, which does not exist")


def _open_rank_folder(folder: Path, rank_folder: Path, config_file: Path | None) -> Checkpoint:
    """Opens other programs' files in `rank_folder`; the configuration may be in either folder."""
    read = find_reader(rank_folder)
    kind: Kind
    saved: SavedRun | None = None
    if is_dcp(rank_folder):
        saved, tensors = open_dcp(rank_folder)
        ranks = (tensors,)
        kind = "dcp" if saved is None else "megatron"
    elif read is not None:
        saved, ranks = read(rank_folder)
        kind = "megatron"
    else:
        ranks = _read_legacy_ranks(rank_folder)
        kind = "legacy"
    has_config = (rank_folder / CONFIG).exists()
    config = _read_config(rank_folder if has_config else folder, config_file)
    return Checkpoint(kind, folder, config, ranks, saved=saved)


def _read_legacy_ranks(folder: Path) -> tuple[dict[str, StoredTensor], ...]:
    """Returns each rank's tensors by name, of the original GLM's, DeepSpeed's or FlagAI's files."""
    names = [entry.name for entry in folder.iterdir()]
    by_rank: dict[int, str] = {}
    for pattern in LEGACY_FILES:
        matches = map(pattern.fullmatch, names)
        by_rank = {int(match[1]): match.string for match in matches if match}
        if by_rank:
            break
    size = len(by_rank)
    if sorted(by_rank) != list(range(size)) or not by_rank:
        raise ValueError(
            f"{folder} has rank files {sorted(by_rank)}; "
            f"it must have one for each rank, numbered from 0 without gaps"
        )
    ranks: list[dict[str, StoredTensor]] = []
    for rank in range(size):
        tensors = index_by_name(_read_weights(checked_file(folder, by_rank[rank]), size))
        if ranks:
            differing = sorted(tensors.keys() ^ ranks[0].keys())
            if differing:
                raise ValueError(
                    f"tensor {differing[0]} is not in both {by_rank[0]} and {by_rank[rank]} "
                    f"of {folder}"
                )
        ranks.append(tensors)
    return tuple(ranks)
