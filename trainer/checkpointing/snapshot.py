"""Takes a snapshot of a training step: copies it to CPU memory before the next update, then writes
it to disk.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...checkpoint.folder_files import STATE, STATE_VERSION, read_state_file
from ...checkpoint.rank_files import (
    OPTIMIZER,
    FileShare,
    TensorPart,
    divide_file,
    rank_file,
    write_share,
)
from ...checkpoint.tensor_reader import tensor_bytes
from ...files.durable import sync, write_durably
from ...files.hashing import hash_file
from ...files.json_digest import add_digest
from ...mpu.mesh import EXPERT_REPLICA_AXES
from ..engines.engine import Engine
from ..engines.state import model_tensors, persistent_buffers
from ..launch.phase import SAVE, phase
from ..launch.ranks import Ranks
from .extra_files import ExtraFiles
from .model_files import ModelFiles, Tensors, model_files
from .random_state import random_state_tensors
from .staging_buffers import StagingBuffers

RANDOM = "random"


@dataclass(frozen=True)
class TrainerState:
    """The state of a run in a checkpoint.

    Attributes:
        step: Completed optimizer steps.
        consumed_samples: Samples trained on, over all ranks.
        data: The data's position.
        schedule: The state of a learning-rate scheduler.
        rates: The learning rate of each parameter group in the next step; None for a group whose
            optimizer finds its own. For programs that go on with the run.
        optimizer: The name of the optimizer's class.
        groups: The changes in the optimizer's parameter groups.
        world_size: Number of processes, each of which has random states.
        validation: The last validation values, and their step.
        best: The best validation value so far, its name and its step, if one is tracked.
        unlogged_losses: The losses of the steps since the last logged one, whose mean is logged
            with the next one.
    """

    step: int
    consumed_samples: int
    data: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    rates: list[float | None] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    optimizer: str = ""
    groups: list[dict[str, Any]] = field(default_factory=list)
    world_size: int = 1
    validation: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    unlogged_losses: list[float] = field(default_factory=list)


@dataclass
class Snapshot:
    """What this rank writes of a checkpoint.

    Attributes:
        tensors: The tensors of each file, which are the model's and the optimizer's own; the
            data-parallel ranks that write the file, by their number and this rank's place among
            them.
        weights: The name of the file with the model's parameters, if this rank has one.
        extra_files: Further files, such as the tokenizer's.
        files: The rank's share of each file, after `divide` or `copy`.
    """

    state: TrainerState
    tensors: dict[str, tuple[Tensors, int, int]]
    weights: str | None
    model_files: ModelFiles
    extra_files: ExtraFiles
    files: dict[str, FileShare] = field(default_factory=dict[str, FileShare])

    def divide(self) -> None:
        """Finds this rank's share of each file, in the model's and the optimizer's own tensors."""
        self.files = {name: divide_file(*own) for name, own in self.tensors.items()}

    def copy(self, buffers: StagingBuffers) -> None:
        """Copies this rank's shares to the buffers, so that the next update may change the
        originals.

        The previous snapshot must have been written, because it used the same buffers.
        """
        self.divide()
        self.files = {
            name: replace(own, pieces=buffers.copy(name, own.pieces))
            for name, own in self.files.items()
        }


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
    """Returns this rank's data of a checkpoint of the current step. `copy` must run before the next
    update.

    The data-parallel ranks divide weights and optimizer between them, so no rank gathers a state.
    `optimizer` and `random` say whether to include the states of the optimizer and of the random
    generators. Training waits for this, so it only lists the tensors.
    """
    weights = files.weights_file(ranks)
    mine: dict[str, tuple[Tensors, int, int]] = {}
    tensors = files.stored(engine.model_tensors())
    if weights is not None:
        mine[weights] = (
            divide_buffers(engine.module, tensors, ranks),
            ranks.replica_rank,
            ranks.replica_size,
        )
    if optimizer:
        name = rank_file(Path(), OPTIMIZER, ranks.tp_rank, ranks.pp_rank).name
        states = place_experts(engine.module, engine.optimizer_tensors(), ranks)
        mine[name] = (states, ranks.replica_rank, ranks.replica_size)
    if random:
        name = rank_file(Path(), RANDOM, ranks.rank).name
        mine[name] = (random_state_tensors(), 0, 1)
    return Snapshot(state, mine, weights, files, extra_files)


def divide_buffers(module: nn.Module, tensors: Tensors, ranks: Ranks) -> Tensors:
    """Returns a model's tensors for a file that all replicas write.

    As in training, the first replica's buffers count, so the others contribute no bytes of them.
    """
    tensors = place_experts(module, tensors, ranks)
    others = tensors.keys() - dict(module.named_parameters()).keys()
    if ranks.replica_size == 1 or not others:
        return tensors
    parts = dict(tensors)
    for name in persistent_buffers(module).keys() & others:
        value = tensors[name]
        if isinstance(value, Tensor):
            own = value if ranks.replica_rank == 0 else value.new_empty(0)
            parts[name] = TensorPart(tuple(value.shape), 0, own)
    return parts


def place_experts(module: nn.Module, tensors: Tensors, ranks: Ranks) -> Tensors:
    """Returns tensors for a file that has all experts, in which this rank's are a part.

    Of the ranks with the same whole experts, the first one writes them.

    Args:
        tensors: By the names of parameters, or by STATE/PARAMETER.
    """
    mesh = ranks.mesh
    if mesh is None or ranks.ep_size == 1:
        return tensors
    parameters = dict(module.named_parameters())
    placed = dict(tensors)
    for name, value in tensors.items():
        parameter: Any = parameters.get(name.rpartition("/")[2])
        is_expert = getattr(parameter, "expert_parallel", False)
        if not is_expert or value.shape != parameter.shape:
            continue  # such as a step count, which is equal on all ranks
        before = 0
        for rank in range(mesh.rank_in("expert")):
            own = parameter.shard.local_shape({**mesh.ranks, "expert": rank}, mesh.sizes)
            before += prod(own)
        ranks_of_file = {**mesh.ranks, "expert": 0}
        whole = parameter.shard.local_shape(ranks_of_file, {**mesh.sizes, "expert": 1})
        if isinstance(value, TensorPart):
            placed[name] = TensorPart(whole, before + value.start, value.values)
            continue
        if mesh.rank_in(*EXPERT_REPLICA_AXES) > 0:
            value = value.new_empty(0)
        placed[name] = TensorPart(whole, before, value)
    return placed


@phase(SAVE)
def write_snapshot(
    snapshot: Snapshot, folder: Path, ranks: Ranks, group: dist.ProcessGroup | None
) -> None:
    """Writes to a folder next to `folder`, and renames it when everything is on disk. Collective
    over `group`.

    Raises OSError on every rank if one could not write. The partial folder is then deleted, and
    `folder` is unchanged.
    """
    partial = folder.with_name(f".{folder.name}.partial")

    def begin() -> None:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    _agree(ranks, group, begin)
    written = _agree(ranks, group, lambda: _write_files(snapshot, partial), undo=partial)
    # Of tensors that several ranks have written, nobody has the bytes in memory.
    cut = _agree(ranks, group, lambda: _hash_cut_tensors(snapshot, partial, ranks), undo=partial)
    hashes: list[dict[str, str]] = [{} for _ in range(ranks.tp_size)]  # each the union of its ranks
    for number, found in enumerate(zip(written, cut, strict=True)):
        hashes[number % ranks.tp_size].update(found[0]["tensors"] | found[1])

    def complete() -> None:
        if ranks.rank == 0:
            _complete(snapshot, partial, folder, _digests(written), hashes)

    _agree(ranks, group, complete, undo=partial)


def _agree(
    ranks: Ranks, group: dist.ProcessGroup | None, work: Callable[[], Any], undo: Path | None = None
) -> list[Any]:
    """Runs `work` on each rank. Returns the results of all ranks, or raises OSError on all if it
    failed on one.

    After a failure rank 0 deletes the folder `undo`.
    """
    result = None
    problem = ""
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


def _write_files(snapshot: Snapshot, folder: Path) -> dict[str, Any]:
    """Writes this rank's bytes.

    Returns what it wrote of each file, and the sha256 of its whole tensors.
    """
    files = {}
    for name, share in snapshot.files.items():
        ranges, digest = write_share(folder / name, share)
        files[name] = {"ranges": ranges, "sha256": digest}
    tensors = {}
    if snapshot.weights:
        own = snapshot.files[snapshot.weights]
        for name in own.whole:
            tensors[name] = hashlib.sha256(tensor_bytes(own.pieces[name])).hexdigest()
    return {"files": files, "tensors": tensors}


def _hash_cut_tensors(snapshot: Snapshot, folder: Path, ranks: Ranks) -> dict[str, str]:
    if snapshot.weights is None:
        return {}
    cut = sorted(snapshot.files[snapshot.weights].cut.items())[
        ranks.replica_rank :: ranks.replica_size
    ]
    return {
        name: hash_file(folder / snapshot.weights, [(at, at + size)]) for name, (at, size) in cut
    }


def _digests(written: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the digest of each file: its sha256, or, for a file of several ranks, that of each
    rank's bytes.
    """
    parts: dict[str, list[dict[str, Any]]] = {}
    for own in written:
        for name, part in own["files"].items():
            if part["ranges"]:
                parts.setdefault(name, []).append(part)
    digests: dict[str, Any] = {}
    for name, found in parts.items():
        digests[name] = found
        if len(found) == 1:
            digests[name] = found[0]["sha256"]
    return digests


def _complete(
    snapshot: Snapshot,
    partial: Path,
    folder: Path,
    digests: dict[str, Any],
    hashes: list[dict[str, str]],
) -> None:
    snapshot.model_files.describe(hashes, snapshot.extra_files.vocabulary)(partial)
    for name, content in snapshot.extra_files.contents.items():
        (partial / name).write_bytes(content)
    for entry in partial.iterdir():
        if entry.name not in digests:
            sync(entry)
            digests[entry.name] = hash_file(entry)
    sizes = {entry.name: entry.stat().st_size for entry in partial.iterdir()}
    write_state(partial / STATE, snapshot.state, files=digests, sizes=sizes)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def write_model(model: nn.Module, folder: Path, ranks: Ranks, extra_files: ExtraFiles) -> None:
    """Writes a folder with a model's weights and the extra files, as in a checkpoint.

    Collective.
    """
    files = model_files(model)
    tensors = model_tensors(model)
    name = files.weights_file(ranks)
    mine: dict[str, tuple[Tensors, int, int]] = {}
    if name is not None:
        mine[name] = (divide_buffers(model, tensors, ranks), ranks.replica_rank, ranks.replica_size)
    snapshot = Snapshot(TrainerState(step=0, consumed_samples=0), mine, name, files, extra_files)
    snapshot.divide()
    write_snapshot(snapshot, folder, ranks, None)


def write_state(path: Path, state: TrainerState, **of_files: Mapping[str, Any]) -> None:
    """Writes a run's state with what is recorded of every other file of the checkpoint: digests and
    sizes.
    """
    recorded = {key: dict(sorted(values.items())) for key, values in of_files.items()}
    _write_content(path, {**asdict(state), "version": STATE_VERSION, **recorded})


def amend_state(folder: Path, **values: Any) -> None:
    """Changes the given fields of the `TrainerState` in a complete checkpoint.

    If it fails, none has changed.
    """
    _write_content(folder / STATE, {**read_state_file(folder), **values})


def _write_content(path: Path, values: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(add_digest(values), indent=1))
