"""Takes a snapshot of a training step: copies it to CPU memory before the next update, then writes it to disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...checkpoint.json_digest import add_digest, sync_folder, write_durably
from ...checkpoint.rank_files import rank_file, write_tensors
from ...checkpoint.tensor_reader import tensor_bytes
from ...data.files import read_json_object
from ..engines.engine import Engine
from ..engines.state import model_tensors
from ..launch.ranks import Ranks
from .extra_files import ExtraFiles
from .model_files import OPTIMIZER, ModelFiles, model_files
from .random_state import random_state_tensors
from .staging_buffers import StagingBuffers

STATE = "trainer_state.json"
RANDOM = "random"


@dataclass(frozen=True)
class TrainerState:
    """The state of a run in a checkpoint.

    Attributes:
        step: Completed optimizer steps.
        consumed_samples: Samples trained on, over all ranks.
        data: The data's position.
        schedule: The state of a learning-rate scheduler.
        optimizer: The name of the optimizer's class.
        groups: The changes in the optimizer's parameter groups.
        world_size: Number of processes, each of which has random states.
        validation: The last validation values, and their step.
        best: The best validation value so far, its name and its step, if one is tracked.
    """

    step: int
    consumed_samples: int
    data: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    optimizer: str = ""
    groups: list[dict[str, Any]] = field(default_factory=list)
    world_size: int = 1
    validation: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)


@dataclass
class Snapshot:
    """The files of a checkpoint that this rank writes.

    Attributes:
        files: The tensors of each file. Before `copy` they are the model's and the optimizer's own tensors.
        weights: The name of the file with the model's parameters; None on ranks that do not write it.
        extra_files: Further files, such as the tokenizer's.
    """

    state: TrainerState
    files: dict[str, dict[str, Tensor]]
    weights: str | None
    model_files: ModelFiles
    extra_files: ExtraFiles

    def copy(self, buffers: StagingBuffers) -> None:
        """Copies all tensors to the buffers, so that the next update may change the originals.

        The previous snapshot must have been written, because it used the same buffers.
        """
        self.files = {name: buffers.copy(name, tensors) for name, tensors in self.files.items()}


def take_snapshot(
    engine: Engine,
    files: ModelFiles,
    ranks: Ranks,
    state: TrainerState,
    *,
    optimizer: bool,
    random: bool,
    extra_files: ExtraFiles,
) -> Snapshot:
    """Returns all data of a checkpoint of the current step. `copy` must run before the next update. Collective.

    `optimizer` and `random` say whether to include the states of the optimizer and of the random generators.
    """
    weights = files.stored(engine.model_tensors())
    moments = engine.optimizer_tensors() if optimizer else {}
    name = files.weights_file(ranks) if ranks.dp_rank == 0 else None
    mine: dict[str, dict[str, Tensor]] = {}
    if ranks.dp_rank == 0:
        if name is not None:
            mine[name] = weights
        if optimizer:
            mine[rank_file(Path(), OPTIMIZER, ranks.tp_rank, ranks.pp_rank).name] = moments
    if random:
        mine[rank_file(Path(), RANDOM, ranks.rank).name] = random_state_tensors()
    return Snapshot(state, mine, name, files, extra_files)


def write_snapshot(snapshot: Snapshot, folder: Path, ranks: Ranks, group: dist.ProcessGroup | None) -> None:
    """Writes to a folder next to `folder`, and renames it when everything is on disk. Collective over `group`.

    Raises OSError on every rank if one could not write. The partial folder is then deleted, and `folder` is unchanged.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    _agree(ranks, group, lambda: _make_empty(partial) if ranks.rank == 0 else None)
    written = _agree(ranks, group, lambda: _write_files(snapshot, partial), undo=partial)
    digests = {name: digest for files, _ in written for name, digest in files.items()}
    hashes: list[dict[str, str]] = [{} for _ in range(ranks.tp_size)]  # each the union of a rank's pipeline stages
    for number, tensors in enumerate(tensors for _, tensors in written if tensors is not None):
        hashes[number % ranks.tp_size].update(tensors)

    def complete() -> None:
        if ranks.rank == 0:
            _complete(snapshot, partial, folder, digests, hashes)

    _agree(ranks, group, complete, undo=partial)


def _agree(
    ranks: Ranks, group: dist.ProcessGroup | None, work: Callable[[], Any], undo: Path | None = None
) -> list[Any]:
    """Runs `work` on each rank. Returns the results of all ranks, or raises OSError on all if it failed on one.

    After a failure rank 0 deletes the folder `undo`.
    """
    result, problem = None, ""
    try:
        result = work()
    except OSError as error:
        problem = f"rank {ranks.rank} could not write a checkpoint: {error.strerror or error}"
    outcomes = ranks.gather((result, problem), group)
    problems = [problem for _, problem in outcomes if problem]
    if problems:
        if undo is not None and ranks.rank == 0:
            shutil.rmtree(undo, ignore_errors=True)
        raise OSError(problems[0])
    return [result for result, _ in outcomes]


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_files(snapshot: Snapshot, folder: Path) -> tuple[dict[str, str], dict[str, str] | None]:
    """Writes this rank's files. Returns the sha256 of each file, and of each tensor of the weights."""
    digests = {name: write_tensors(folder / name, tensors) for name, tensors in snapshot.files.items()}
    if snapshot.weights is None:
        return digests, None
    tensors = snapshot.files[snapshot.weights]
    return digests, {name: hashlib.sha256(tensor_bytes(tensor)).hexdigest() for name, tensor in tensors.items()}


def _complete(
    snapshot: Snapshot, partial: Path, folder: Path, digests: dict[str, str], hashes: list[dict[str, str]]
) -> None:
    snapshot.model_files.describe(hashes, snapshot.extra_files.vocabulary)(partial)
    for name, content in snapshot.extra_files.contents.items():
        (partial / name).write_bytes(content)
    write_state(partial / STATE, snapshot.state, digests)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync_folder(folder.parent)


def write_model(model: nn.Module, folder: Path, ranks: Ranks, extra_files: ExtraFiles) -> None:
    """Writes a folder with a model's weights and the extra files, as in a checkpoint. Collective."""
    files = model_files(model)
    name = files.weights_file(ranks) if ranks.dp_rank == 0 else None
    mine = {} if name is None else {name: model_tensors(model)}
    state = TrainerState(step=0, consumed_samples=0)
    write_snapshot(Snapshot(state, mine, name, files, extra_files), folder, ranks, None)


def write_state(path: Path, state: TrainerState, digests: Mapping[str, str]) -> None:
    _write_content(path, {**asdict(state), "files": dict(sorted(digests.items()))})


def amend_state(folder: Path, **values: Any) -> None:
    """Changes the given fields of the `TrainerState` in a complete checkpoint. If it fails, none has changed."""
    content = read_json_object(folder / STATE, finite=False)
    del content["sha256"]
    _write_content(folder / STATE, {**content, **values})


def _write_content(path: Path, values: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(add_digest(values), indent=1))
