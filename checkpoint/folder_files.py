"""Lists the small files of a checkpoint folder that are copied together with its weights."""

from __future__ import annotations

from pathlib import Path

from ..data.files import checked_file

CONFIG = "config.json"
WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot", ".gguf", ".ckpt", ".npz", ".partial")
)
OWN_FILES = frozenset(("manifest.json", "trainer_state.json", "latest", "latest_checkpointed_iteration.txt"))
LARGEST_COMPANION = 1 << 30  # bytes


def holds_weights(name: str) -> bool:
    """Returns whether a file of this name belongs to the weights or to their description, apart from config.json."""
    is_weight = Path(name).suffix in WEIGHT_SUFFIXES or name.endswith((".safetensors.index.json", ".bin.index.json"))
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
