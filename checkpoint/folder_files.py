"""Lists the files of a checkpoint folder besides its weights, and compares files with their recorded digests."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..data.tokenizers.files import TOKENIZER_FILES
from ..files.durable import write_durably
from ..files.json_digest import add_digest, remove_digest
from ..files.safe_paths import checked_file
from ..files.strict_json import is_object, read_folder_json

CONFIG = "config.json"
STATE = "trainer_state.json"  # of a training checkpoint; it records the digests of all other files
WEIGHT_SUFFIXES = frozenset(
    (
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".h5",
        ".msgpack",
        ".onnx",
        ".ot",
        ".gguf",
        ".ckpt",
        ".npz",
        ".partial",
    )
)
OWN_FILES = frozenset(("manifest.json", STATE, "latest", "latest_checkpointed_iteration.txt"))
LARGEST_COMPANION = 1 << 30  # bytes
EVERY_FILE = 2  # the version of the state whose digests are those of every file; before, of the tensors' files alone

Ranges = list[tuple[int, int]]  # [first byte, end)


def holds_weights(name: str) -> bool:
    """Returns whether a file of this name belongs to the weights or to their description, apart from config.json."""
    is_weight = Path(name).suffix in WEIGHT_SUFFIXES or name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )
    return is_weight or name in OWN_FILES


def stage_files(folder: Path, first: str) -> list[Path]:
    """Returns the files of a rank: `first`, such as rank_00.safetensors, and those of the later pipeline stages.

    Raises ValueError if one is missing: stage s wrote `rank_00_stage_0s.safetensors`.
    """
    stem, suffix = Path(first).stem, Path(first).suffix
    stages = len(list(folder.glob(f"{stem}_stage_*{suffix}")))
    later = [f"{stem}_stage_{stage:02d}{suffix}" for stage in range(1, stages + 1)]
    return [checked_file(folder, name) for name in (first, *later)]


def companion_files(folder: Path) -> list[Path]:
    """Returns the files to copy with the weights: config.json, tokenizer and generation files, other small files."""
    files: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if holds_weights(entry.name) or entry.name.startswith(".") or entry.is_dir():
            continue
        path = checked_file(folder, entry.name)
        if path.stat().st_size <= LARGEST_COMPANION:
            files.append(path)
    return files


def read_state_file(folder: Path) -> dict[str, Any]:
    """Returns the contents of a training checkpoint's state. Raises ValueError if it is missing or damaged."""
    content = read_folder_json(folder, STATE, finite=False)  # the best loss may be infinite
    if content is None:
        raise ValueError(f"{STATE} is missing")
    remove_digest(content, folder / STATE)
    version = content.get("version", EVERY_FILE)
    if version not in (1, EVERY_FILE):
        raise ValueError(
            f"{STATE} has version {version!r:.20}; this version of shardzoo reads {EVERY_FILE}"
        )
    if not is_object(content.get("files")):
        raise ValueError(f"{STATE} lists no files")
    return content


def changed_files(folder: Path, share: int = 0, shares: int = 1) -> Iterator[str]:
    """Yields a problem for each file of a training checkpoint that is not as it was written.

    With `shares`, the work is divided: share 0 compares the first part of the digests, and so on.

    Raises ValueError if the state is missing or damaged, or names something other than a file of the folder.
    """
    state = read_state_file(folder)
    digests: dict[str, Any] = state["files"]
    work = [(name, part) for name in sorted(digests) for part in _parts(state, name)]
    for name, part in work[share::shares]:
        yield from _changed(folder, name, *part)
    if share == 0 and state.get("version") == EVERY_FILE:
        for entry in sorted(folder.iterdir()):
            if entry.name not in digests and is_read(entry.name) and entry.name != STATE:
                yield f"{entry.name} does not belong to it"


def is_read(name: str) -> bool:
    """Returns whether a checkpoint's readers would open a file of this name."""
    return holds_weights(name) or name == CONFIG or name in TOKENIZER_FILES


def holds_training_state(folder: Path) -> bool:
    """Returns whether a folder is a training checkpoint, whose state `read_state_file` reads.

    The Trainer of transformers writes a file of the same name into its checkpoints, which are Hugging Face folders.
    """
    state = folder / STATE
    if not state.exists() and not state.is_symlink():
        return False
    if (folder / "manifest.json").exists():
        return True
    content = read_folder_json(folder, STATE, finite=False) or {}
    return not isinstance(content.get("log_history"), list) or not content.keys().isdisjoint(
        ("files", "sha256")
    )


def check_companions(folder: Path, without: Collection[str] = ()) -> None:
    """Raises ValueError if a training checkpoint's configuration, manifest or tokenizer has changed.

    Does nothing for other folders, and for checkpoints that were written before those had digests.
    """
    if not holds_training_state(folder):
        return
    names = read_state_file(folder)["files"]
    check_recorded(
        folder,
        [name for name in names if Path(name).suffix != ".safetensors" and name not in without],
    )


def check_recorded(folder: Path, names: Iterable[str]) -> None:
    """Raises ValueError if one of these files of a training checkpoint has changed, or is not recorded."""
    state = read_state_file(folder)
    for name in sorted(names):
        if name not in state["files"]:
            raise ValueError(f"the checkpoint {folder} is damaged: {STATE} has no digest of {name}")
        for part in _parts(state, name):
            for problem in _changed(folder, name, *part):
                raise ValueError(f"the checkpoint {folder} is damaged: {problem}")


def seal(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes the state of a training checkpoint with the digests and sizes of all files that the folder has."""
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")
    )
    recorded = {
        "files": {path.name: file_digest(path) for path in files},
        "sizes": {path.name: path.stat().st_size for path in files},
    }
    write_durably(
        folder / STATE,
        json.dumps(add_digest({**state, "version": EVERY_FILE, **recorded}), indent=1),
    )


def _parts(state: Mapping[str, Any], name: str) -> list[tuple[Ranges | None, str, int | None]]:
    """Returns the byte ranges and the sha256 of each part of a file, which several ranks may have written.

    Returns with each the size of the file, which earlier versions did not record.
    """
    digest, sizes = state["files"][name], state.get("sizes", {})
    end = sizes.get(name) if is_object(sizes) else None
    if isinstance(digest, str):
        return [(None, digest, end if type(end) is int else None)]
    try:
        parts = [
            ([(int(a), int(b)) for a, b in part["ranges"]], str(part["sha256"])) for part in digest
        ]
        if not parts:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{STATE} has no digest of {name!r:.100} but {digest!r:.100}") from None
    end = 0
    for first, stop in sorted(span for ranges, _ in parts for span in ranges):
        if first != end or stop < first:
            raise ValueError(
                f"the digests of {name!r:.100} in {STATE} leave out or repeat bytes at {end:,}"
            )
        end = stop
    return [(ranges, sha256, end) for ranges, sha256 in parts]


def _changed(
    folder: Path, name: str, ranges: Ranges | None, digest: str, size: int | None
) -> Iterator[str]:
    """Yields what is wrong with a part of a file, if anything."""
    if "/" not in name and "\0" not in name and not os.path.lexists(folder / name):
        yield f"{name} is missing"
    elif size is not None and (found := checked_file(folder, name).stat().st_size) != size:
        yield f"{name} has {found:,} bytes instead of {size:,}"
    elif file_digest(checked_file(folder, name), ranges) != digest:
        yield f"{name} has changed since it was written"


def file_digest(path: Path, ranges: Ranges | None = None) -> str:
    """Returns the sha256 of a file, or of ranges of its bytes one after another."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for first, end in ranges or [(0, path.stat().st_size)]:
            file.seek(first)
            while first < end and (block := file.read(min(1 << 20, end - first))):
                digest.update(block)
                first += len(block)
    return digest.hexdigest()
