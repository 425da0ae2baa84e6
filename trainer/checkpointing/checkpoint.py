"""Finding a checkpoint to go on from, and making sure that it is what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...checkpoint.json_digest import take_digest
from ...checkpoint.rank_files import rank_file
from ...checkpoint.tensor_reader import read_tensors
from ...data.files import checked_file, read_json_object
from ..launch.ranks import Ranks
from ..run_folder import RunFolder
from .random_state import restore_random_state, seed_everything
from .snapshot import RANDOM, STATE, TrainerState


def find_checkpoint(
    path: Path, load_type: str, ranks: Ranks, tell: Callable[[str], None]
) -> tuple[Path, TrainerState] | None:
    """The checkpoint of a run's folder that training goes on from; None if there is none at all. Collective.

    path: a run's folder, or one checkpoint. load_type: "latest", or "best" if one was named so. A damaged checkpoint is
    passed over for the one before it, and `tell` is told. ValueError if all are damaged, or the only one asked for.
    """
    if (path / STATE).exists():
        candidates = [path]
    elif load_type == "best":
        best = RunFolder(path).best_checkpoint()
        if best is None:
            raise ValueError(f"{path} names no best checkpoint; use load_type='latest', or train with save_best")
        candidates = [best]
    else:
        run = RunFolder(path)
        candidates = [run.checkpoint(step) for step in reversed(run.steps())]
    problems = []
    for folder in candidates:
        problem = next(filter(None, ranks.gather(verify_checkpoint(folder, ranks.rank, ranks.world_size))), "")
        if not problem:
            for earlier in problems:
                tell(f"{earlier}; going on from {folder.name} instead")
            return folder, read_state(folder)
        problems.append(problem)
    if problems:
        raise ValueError(f"no checkpoint can be gone on from: {'; '.join(problems)}")
    return None


def verify_checkpoint(folder: Path, share: int, shares: int) -> str:
    """Compares this rank's share of a checkpoint's files with their digests; returns the problem, or ""."""
    try:
        digests = _read(folder)["files"]
        for name in sorted(digests)[share::shares]:
            if not (folder / name).exists():
                return f"the checkpoint {folder} is damaged: {name} is missing"
            with checked_file(folder, name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != digests[name]:
                return f"the checkpoint {folder} is damaged: {name} is not what was written"
    except (OSError, ValueError) as error:
        return f"the checkpoint {folder} is damaged: {error}"
    return ""


def read_state(folder: Path) -> TrainerState:
    content = _read(folder)
    known = [field.name for field in fields(TrainerState)]
    return TrainerState(**{name: content[name] for name in known if name in content})  # older ones have fewer


def restore_random(folder: Path, state: TrainerState, ranks: Ranks, seed: int) -> bool:
    """Puts this rank's generators back; seeds them anew, and says False, where their states were not saved."""
    path = rank_file(folder, RANDOM, ranks.rank)
    if state.world_size == ranks.world_size and path.exists():
        restore_random_state(read_tensors(path))
        return True
    seed_everything(seed + 7919 * state.step + ranks.dp_rank)
    return False


def _read(folder: Path) -> dict[str, Any]:
    if not (folder / STATE).exists():
        raise ValueError(f"{STATE} is missing")
    content = read_json_object(checked_file(folder, STATE), finite=False)  # the best loss may be infinite
    take_digest(content, folder / STATE)
    if not isinstance(content.get("files"), dict):
        raise ValueError(f"{STATE} lists no files")
    return content
