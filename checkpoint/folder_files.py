"""Which files of a folder are trusted to belong to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from .strict_json import read_json_object

CONFIG = "config.json"
WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot", ".gguf", ".ckpt", ".npz", ".partial")
)
OWN_FILES = frozenset(("manifest.json", "trainer_state.json", "latest", "latest_checkpointed_iteration.txt"))
LARGEST_COMPANION = 1 << 30


def checked_file(folder: Path, name: str) -> Path:
    """`folder / name`, if that is a regular file of this folder. ValueError otherwise.

    A symbolic link may lead to a file of the folder itself, or into the `blobs` of a Hugging Face cache, whose
    snapshots are made of such links.
    """
    if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name:
        raise ValueError(f"{folder} names a file {name!r}; a checkpoint's files lie in its own folder")
    path = folder / name
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, on older Pythons
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read {path}: {reason}") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is no regular file")
    home = folder.resolve()
    if real.parent != home and real.parent != home.parent.parent / "blobs":
        raise ValueError(f"{path} is a link out of its folder, to {real}; copy the file there first")
    return path


def read_folder_json(folder: Path, name: str) -> dict[str, Any] | None:
    """Returns the JSON object of a checkpoint's file; None if there is no such file. ValueError if it is damaged."""
    path = folder / name
    return read_json_object(checked_file(folder, name)) if path.exists() or path.is_symlink() else None


def companion_files(folder: Path) -> list[Path]:
    """The tokenizer's, generation's and other small files that travel along with the weights; config.json too."""
    files = []
    for entry in sorted(folder.iterdir()):
        is_weight = entry.suffix in WEIGHT_SUFFIXES or entry.name.endswith(
            (".safetensors.index.json", ".bin.index.json")
        )
        if is_weight or entry.name in OWN_FILES or entry.name.startswith(".") or entry.is_dir():
            continue
        path = checked_file(folder, entry.name)
        if path.stat().st_size <= LARGEST_COMPANION:
            files.append(path)
    return files
