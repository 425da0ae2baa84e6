"""Finding a checkpoint to go on from, and making sure that it is what was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ...checkpoint.rank_files import rank_file
from ..launch.ranks import Ranks
from ..run_folder import RunFolder
from .random_state import restore_random_state, seed_everything
from .snapshot import RANDOM, STATE, TrainerState, content_digest


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
            with (folder / name).open("rb") as file:
                digest = _digest(file)
            if digest.hexdigest() != digests[name]:
                return f"the checkpoint {folder} is damaged: {name} is not what was written"
    except FileNotFoundError as error:
        return f"the checkpoint {folder} is damaged: {Path(error.filename).name} is missing"
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
        restore_random_state(load_file(path))
        return True
    seed_everything(seed + 7919 * state.step + ranks.dp_rank)
    return False


def _read(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / STATE).read_text())
        digest = content.pop("sha256")
        if digest != content_digest(content) or not isinstance(content["files"], dict):
            raise ValueError(f"{STATE} does not match its own sha256")
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{STATE} is unreadable") from None
    return content


def _digest(file: Any) -> Any:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest
