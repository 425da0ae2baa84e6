"""Lists the files of a checkpoint folder besides its weights, and keeps their digests.

A training checkpoint records the sha256 of all its files in `trainer_state.json`. A file that
several ranks wrote has a digest for each rank's byte ranges.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.tokenizers.files import TOKENIZER_FILES
from ..files.durable import write_durably
from ..files.hashing import hash_file
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
OWN_FILES = frozenset(
    ("manifest.json", STATE, "latest", "latest_checkpointed_iteration.txt", "latest_universal")
)
LARGEST_AUXILIARY_FILE = 1 << 30  # bytes
GENERATION_CONFIG = "generation_config.json"
# The files in which a model or an adapter is saved, with their indexes; a file like model_ema.safetensors is
# somebody else's.
_PARTS = r"(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
MODEL_WEIGHTS = re.compile(f"(model|pytorch_model){_PARTS}")
ADAPTER_WEIGHTS = re.compile(f"adapter_model{_PARTS}")
# The other files of a saved model or adapter; those of a tokenizer are in TOKENIZER_FILES.
ADAPTER_CONFIG = "adapter_config.json"
DESCRIPTIONS = (CONFIG, ADAPTER_CONFIG, GENERATION_CONFIG)
# The version of the state file. In version 1 only the tensors' files had digests.
STATE_VERSION = 2


def holds_weights(name: str) -> bool:
    """Returns whether a file belongs to the weights or to their description, judging by its name.

    config.json does not.
    """
    if name in OWN_FILES or name.endswith((".safetensors.index.json", ".bin.index.json")):
        return True
    return Path(name).suffix in WEIGHT_SUFFIXES


def refuse_run_folder(folder: Path) -> None:
    """Raises ValueError if a folder that is named as a model is a run's, which has models in it."""
    if (folder / "checkpoints").is_dir():
        raise ValueError(
            f"{folder} is a run's folder; "
            f"name a model in it: {folder}/hf, or one of its checkpoints"
        )


def refuse_adapter_folder(folder: Path) -> None:
    """Raises ValueError if a folder that is named as a model has LoRA weights instead."""
    if (folder / ADAPTER_CONFIG).exists():
        raise ValueError(
            f"{folder} has only LoRA weights ({ADAPTER_CONFIG}): name their model, and this folder "
            f"as its adapter: --model BASE --adapter {folder}"
        )


def remove_files(folder: Path, names: re.Pattern[str]) -> None:
    """Removes the files of a folder whose whole names match."""
    for path in sorted(folder.iterdir()):
        if names.fullmatch(path.name):
            path.unlink()


def replace_saved_model(folder: Path, new: Path) -> None:
    """Moves the files of a newly saved model into a folder, and removes `new`.

    What an earlier saved model or adapter left there is removed: its weights, configurations and
    tokenizer.
    All other files stay. The configurations go first and come last, so that nothing loads a
    folder that is half of each.
    """
    if not folder.exists():
        new.rename(folder)
        return
    for name in (*DESCRIPTIONS, *TOKENIZER_FILES):
        (folder / name).unlink(missing_ok=True)
    remove_files(folder, MODEL_WEIGHTS)
    remove_files(folder, ADAPTER_WEIGHTS)
    for path in sorted(new.rglob("*"), key=lambda path: path.name in DESCRIPTIONS):
        target = folder / path.relative_to(new)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    shutil.rmtree(new)


def find_stage_files(folder: Path, first: str) -> list[Path]:
    """Returns the files of one rank: that of the first pipeline stage, and those of the later ones.

    Stage s of `rank_00.safetensors` is in `rank_00_stage_0s.safetensors`.

    Raises:
        ValueError: One is missing.
    """
    stem = Path(first).stem
    suffix = Path(first).suffix
    stages = len(list(folder.glob(f"{stem}_stage_*{suffix}")))
    later = [f"{stem}_stage_{stage:02d}{suffix}" for stage in range(1, stages + 1)]
    return [checked_file(folder, name) for name in (first, *later)]


def list_auxiliary_files(folder: Path) -> list[Path]:
    """Returns the small files that go with the weights wherever they are copied.

    They are config.json, the files of the tokenizer and of generation, and others.
    """
    files: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if holds_weights(entry.name) or entry.name.startswith(".") or entry.is_dir():
            continue
        path = checked_file(folder, entry.name)
        if path.stat().st_size <= LARGEST_AUXILIARY_FILE:
            files.append(path)
    return files


def holds_training_state(folder: Path) -> bool:
    """Returns whether a folder is a training checkpoint, whose state `read_state_file` reads.

    The Trainer of transformers writes a file of the same name into its checkpoints, which are
    Hugging Face folders.
    """
    state = folder / STATE
    if not state.exists() and not state.is_symlink():
        return False
    if (folder / "manifest.json").exists():
        return True
    content = read_folder_json(folder, STATE, finite=False) or {}
    is_transformers = isinstance(content.get("log_history"), list)
    return not is_transformers or "files" in content or "sha256" in content


def read_state_file(folder: Path) -> dict[str, Any]:
    """Returns the contents of a training checkpoint's state.

    Raises:
        ValueError: The file is missing or damaged.
    """
    content = read_folder_json(folder, STATE, finite=False)  # The best loss may be infinite.
    if content is None:
        raise ValueError(f"{STATE} is missing")
    remove_digest(content, folder / STATE)
    version = content.get("version", STATE_VERSION)
    if version not in (1, STATE_VERSION):
        raise ValueError(
            f"{STATE} has version {version!r:.20}; this version of shardzoo reads {STATE_VERSION}"
        )
    if not is_object(content.get("files")):
        raise ValueError(f"{STATE} lists no files")
    return content


def read_count(state: Mapping[str, Any], name: str, folder: Path) -> int:
    """Returns a count in a training checkpoint's state, such as its `step`.

    Raises:
        ValueError: There is none, or it is not a number of at least 0.
    """
    count = state.get(name)
    if type(count) is not int or not 0 <= count < 1 << 53:
        raise ValueError(
            f"the checkpoint {folder} is damaged: {STATE} has {name}={count!r:.50}, which must be a "
            "number of at least 0"
        )
    return count


def write_state_file(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes a training checkpoint's state, with digests and sizes of all files in the folder."""
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            files.append(path)
    content = {
        **state,
        "version": STATE_VERSION,
        "files": {path.name: hash_file(path) for path in files},
        "sizes": {path.name: path.stat().st_size for path in files},
    }
    write_durably(folder / STATE, json.dumps(add_digest(content), indent=1))


def find_changed_files(folder: Path, share: int = 0, shares: int = 1) -> Iterator[str]:
    """Yields a problem for each file of a training checkpoint that is not as it was written.

    Args:
        folder: The checkpoint.
        share: Which part of the digests to compare; the work may be divided among ranks.
        shares: The number of parts.

    Raises:
        ValueError: The state is missing or damaged, or names something other than a file of the
            folder.
    """
    state = read_state_file(folder)
    digests: dict[str, Any] = state["files"]
    recorded: list[RecordedDigest] = []
    for name in sorted(digests):
        recorded += _read_digests(state, name)
    for digest in recorded[share::shares]:
        problem = digest.find_problem(folder)
        if problem:
            yield problem
    if share == 0 and state.get("version") == STATE_VERSION:
        for entry in sorted(folder.iterdir()):
            if entry.name not in digests and entry.name != STATE and _is_read(entry.name):
                yield f"{entry.name} does not belong to it"


def _is_read(name: str) -> bool:
    """Returns whether a checkpoint's readers would open a file of this name."""
    return holds_weights(name) or name == CONFIG or name in TOKENIZER_FILES


def check_auxiliary_files(folder: Path, without: Collection[str] = ()) -> None:
    """Checks a training checkpoint's configuration, manifest and tokenizer by their digests.

    Does nothing for other folders, and for checkpoints of versions that recorded no such digests.

    Raises:
        ValueError: A file has changed.
    """
    if not holds_training_state(folder):
        return
    names: list[str] = []
    for name in read_state_file(folder)["files"]:
        if Path(name).suffix != ".safetensors" and name not in without:
            names.append(name)
    check_file_digests(folder, names)


def check_file_digests(folder: Path, names: Iterable[str]) -> None:
    """Checks files of a training checkpoint by their digests.

    Raises:
        ValueError: A file has changed, or is not recorded.
    """
    state = read_state_file(folder)
    for name in sorted(names):
        if name not in state["files"]:
            raise ValueError(f"the checkpoint {folder} is damaged: {STATE} has no digest of {name}")
        for digest in _read_digests(state, name):
            problem = digest.find_problem(folder)
            if problem:
                raise ValueError(f"the checkpoint {folder} is damaged: {problem}")


@dataclass(frozen=True)
class RecordedDigest:
    """What a training checkpoint records of a file, or of one rank's byte ranges of it.

    Attributes:
        name: The name of the file.
        ranges: (first byte, end) of the ranges, or None for the whole file.
        sha256: The digest of these bytes, one range after another.
        size: Bytes of the whole file; None in checkpoints that do not record it.
    """

    name: str
    ranges: tuple[tuple[int, int], ...] | None
    sha256: str
    size: int | None

    def find_problem(self, folder: Path) -> str:
        """Returns what is wrong with the file in `folder`, or an empty string."""
        is_plain = "/" not in self.name and "\0" not in self.name
        if is_plain and not os.path.lexists(folder / self.name):
            return f"{self.name} is missing"
        path = checked_file(folder, self.name)
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            return f"{self.name} has {size:,} bytes instead of {self.size:,}"
        if hash_file(path, self.ranges) != self.sha256:
            return f"{self.name} has changed since it was written"
        return ""


def _read_digests(state: Mapping[str, Any], name: str) -> list[RecordedDigest]:
    """Returns the digests of a file: one, or one for each rank that wrote ranges of it.

    Raises:
        ValueError: They are not of this form, or do not cover the file exactly once.
    """
    recorded = state["files"][name]
    if isinstance(recorded, str):
        sizes = state.get("sizes", {})
        size = sizes.get(name) if is_object(sizes) else None
        if type(size) is not int:
            size = None
        return [RecordedDigest(name, None, recorded, size)]

    parts: list[tuple[tuple[tuple[int, int], ...], str]] = []
    try:
        for part in recorded:
            ranges = tuple((int(first), int(end)) for first, end in part["ranges"])
            parts.append((ranges, str(part["sha256"])))
        if not parts:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{STATE} has no digest of {name!r:.100} but {recorded!r:.100}") from None

    position = 0
    for first, end in sorted(span for ranges, _ in parts for span in ranges):
        if first != position or end < first:
            raise ValueError(
                f"the digests of {name!r:.100} in {STATE} leave out or repeat bytes at {position:,}"
            )
        position = end
    return [RecordedDigest(name, ranges, sha256, position) for ranges, sha256 in parts]
