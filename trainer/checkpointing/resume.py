"""Prepares resuming: finds and verifies the checkpoint that a run resumes from, and opens the run's
folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from ...checkpoint.folder_files import STATE, find_changed_files, read_count, read_state_file
from ...checkpoint.rank_files import rank_file
from ...checkpoint.tensor_reader import read_tensors
from ...files.printable import printable
from ...files.safe_paths import checked_file
from ...files.working_copies import find_source, locate, name_urls, naming_urls
from ..arguments.training_arguments import TrainingArguments
from ..launch.rank_process import mark_run_as_begun
from ..launch.ranks import Ranks, on_first_rank
from ..run_folder import RunFolder
from ..run_lock import return_folder, take_folder
from .random_state import restore_random_state, seed_everything
from .snapshot import RANDOM, TrainerState


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run loads its weights from.

    Attributes:
        optimizer: Also load the optimizer's state, the step and the data's position; else the run
            starts at step 0.
        random: Also load the random states.
        own: The checkpoint is in the run's own folder.
    """

    folder: Path
    state: TrainerState
    optimizer: bool
    random: bool
    own: bool

    @property
    def step(self) -> int:
        if not self.optimizer:
            return 0
        return self.state.step


@naming_urls()
def open_run(
    run_folder: RunFolder, arguments: TrainingArguments, ranks: Ranks, notify: Callable[[str], None]
) -> ResumePoint | None:
    """Finds the checkpoint that `arguments` ask for, if any, and creates the run's folder.
    Collective.

    `resume` takes precedence over a `load_dir` elsewhere, so that a command with both can be
    repeated after each kill. `notify` is called with a message for each damaged checkpoint that is
    skipped.

    Raises ValueError if a required checkpoint does not exist, or the folder holds another run.
    """
    # Before anything is read: another run may still save there.
    on_first_rank(lambda: take_folder(run_folder.path, notify))
    try:
        point = _find(run_folder, arguments, ranks, notify)
        on_first_rank(lambda: _prepare_folder(run_folder, point, arguments))
    except BaseException:
        if ranks.rank == 0:
            return_folder(run_folder.path)
        raise
    return point


def _find(
    run_folder: RunFolder, arguments: TrainingArguments, ranks: Ranks, notify: Callable[[str], None]
) -> ResumePoint | None:
    load_dir = arguments.load_dir
    loads_own = load_dir is not None and run_folder.owns(Path(load_dir))
    if arguments.resume and loads_own:
        raise ValueError(
            f"resume=True continues from the last checkpoint of {run_folder.path}, and load_dir={load_dir} "
            "belongs to the same run; leave one of them out"
        )
    if arguments.resume:
        found = find_checkpoint(run_folder.path, "latest", ranks, notify)
        if found:
            # With `load_dir`, load_optim and load_rng apply to the run's start. Its own checkpoint
            # is loaded whole.
            return ResumePoint(
                *found,
                arguments.load_optim or bool(load_dir),
                arguments.load_rng or bool(load_dir),
                own=True,
            )
    if load_dir is None:
        return None
    folder = _find_load_dir(load_dir, run_folder)
    found = find_checkpoint(folder, arguments.load_type, ranks, notify)
    if found is None:
        raise ValueError(f"load_dir {load_dir} holds no checkpoint")
    return ResumePoint(*found, arguments.load_optim, arguments.load_rng, own=loads_own)


def _find_load_dir(load_dir: str | Path, run_folder: RunFolder) -> Path:
    """Returns the folder that `load_dir` names; of a URL a local copy to read."""
    place = locate(load_dir)
    own = locate(run_folder.path)
    if place.is_relative_to(own):
        return run_folder.path / place.relative_to(own)
    return find_source(load_dir) or Path(load_dir)


def _prepare_folder(
    folder: RunFolder, point: ResumePoint | None, arguments: TrainingArguments
) -> None:
    step = folder.latest_step()
    own = point if point and point.own else None
    if own and not own.optimizer:
        raise ValueError(
            f"load_optim=False starts at step 0, but {folder.path} holds a run that is saved at step {step}; "
            "choose another save_dir or experiment_name"
        )
    if step is not None and not own:
        if not arguments.overwrite:
            raise ValueError(explain_other_run(folder, step))
        load_dir = arguments.load_dir
        if load_dir is not None and locate(load_dir).is_relative_to(locate(folder.path)):
            raise ValueError(
                f"overwrite=True would delete {load_dir}, which load_dir names; choose another "
                "save_dir or experiment_name"
            )
        folder.clear()
    if arguments.tensorboard_dir is not None:
        _make_folder(Path(arguments.tensorboard_dir), "tensorboard_dir")
    folder.delete_unfinished()
    if own:
        folder.drop_after(
            own.state.step, evaluated=own.state.validation.get("step") == own.state.step
        )
        if own.state.best.get("name") == arguments.save_best:
            folder.restore_best(own.state.best)
    else:
        folder.drop_metrics_after(0)  # a run may have been killed before its first checkpoint
    mark_run_as_begun()


def explain_other_run(folder: RunFolder, step: int) -> str:
    """Returns why a run cannot begin in a folder, and what to do."""
    return (
        f"{name_urls(str(folder.path))} holds a run that is saved at step {step}; resume it with resume=True, "
        "replace it with overwrite=True, or choose another save_dir or experiment_name"
    )


def _make_folder(path: Path, meaning: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"{path} cannot be {meaning}, because a file is in its place; name another folder"
        ) from None


def find_checkpoint(
    path: Path, load_type: str, ranks: Ranks, notify: Callable[[str], None]
) -> tuple[Path, TrainerState] | None:
    """Returns the checkpoint to resume from, and its state; None if the folder has no checkpoint.
    Collective.

    If a checkpoint is damaged, the one before it is used, and `notify` is called with a message.
    Raises ValueError if all possible checkpoints are damaged.

    Args:
        path: The folder of a run, or one checkpoint.
        load_type: "latest", or "best" for the checkpoint that `save_best` named.
    """
    if (path / STATE).exists():
        candidates = [path]
    elif load_type == "best":
        best = RunFolder(path).best_checkpoint()
        if best is None:
            raise ValueError(
                f"{path} names no best checkpoint; use load_type='latest', or train with save_best"
            )
        candidates = [best]
    else:
        run = RunFolder(path)
        candidates = [run.checkpoint(step) for step in reversed(run.steps())]
    problems = []
    for folder in candidates:
        problem = next(
            filter(None, ranks.gather(verify_checkpoint(folder, ranks.rank, ranks.world_size))), ""
        )
        if not problem:
            for earlier in problems:
                notify(f"{earlier}; resuming from {folder.name} instead")
            return folder, read_state(folder)
        problems.append(problem)
    if problems:
        raise ValueError(f"there is no undamaged checkpoint to resume from: {'; '.join(problems)}")
    return None


def verify_checkpoint(folder: Path, share: int = 0, shares: int = 1) -> str:
    """Compares a share (from 0) of a checkpoint's files with their digests.

    Returns the first problem, or "".
    """
    try:
        problem = next(find_changed_files(folder, share, shares), "")
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    except ValueError as error:
        problem = str(error)
    return problem and printable(f"the checkpoint {folder} is damaged: {problem}")


def read_state(folder: Path) -> TrainerState:
    """Returns the state of the run in a checkpoint. Raises ValueError if it is damaged."""
    content = read_state_file(folder)
    for name in ("step", "consumed_samples"):
        read_count(content, name, folder)
    # Older checkpoints have fewer fields.
    known = {field.name: field.type for field in fields(TrainerState) if field.name in content}
    for name, kind in known.items():
        if type(content[name]).__name__ != str(kind).partition("[")[0]:
            raise ValueError(
                f"the checkpoint {folder} is damaged: {STATE} has {name}={content[name]!r:.50}"
            )
    return TrainerState(**{name: content[name] for name in known})


def restore_random(folder: Path, state: TrainerState, ranks: Ranks, seed: int) -> bool:
    """Restores this rank's random generators.

    Seeds them again and returns False if the layout has changed.
    """
    path = rank_file(folder, RANDOM, ranks.rank)
    if state.world_size == ranks.world_size and path.exists():
        restore_random_state(read_tensors(checked_file(folder, path.name)))
        return True
    seed_everything(seed + 7919 * state.step + ranks.dp_rank)
    return False
