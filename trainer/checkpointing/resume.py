"""Where a run begins: its folder, and the checkpoint that it goes on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..arguments.training_arguments import TrainingArguments
from ..launch.ranks import Ranks, on_first_rank
from ..run_folder import RunFolder
from .checkpoint import find_checkpoint
from .snapshot import TrainerState


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that gives a run its weights.

    optimizer: it also gives all the rest but the random states, which `random` is about; else the run begins at step 0.
    own: it is in the run's folder.
    """

    folder: Path
    state: TrainerState
    optimizer: bool
    random: bool
    own: bool

    @property
    def step(self) -> int:
        return self.state.step if self.optimizer else 0


def open_run(
    run_folder: RunFolder, arguments: TrainingArguments, ranks: Ranks, tell: Callable[[str], None]
) -> ResumePoint | None:
    """Finds the checkpoint that `arguments` ask for, if any, and makes the run's folder. Collective.

    `resume` comes before a `load_dir` elsewhere, so that a command that has both can be given again after each kill.
    ValueError if there is no checkpoint where there must be one, or if the folder holds another run.
    """
    start = _find(run_folder, arguments, ranks, tell)
    on_first_rank(lambda: _open_folder(run_folder, start, arguments))
    return start


def _find(
    run_folder: RunFolder, arguments: TrainingArguments, ranks: Ranks, tell: Callable[[str], None]
) -> ResumePoint | None:
    load_dir = arguments.load_dir
    loads_own = load_dir is not None and run_folder.owns(Path(load_dir))
    if arguments.resume and loads_own:
        raise ValueError(
            f"resume=True goes on from the last checkpoint of {run_folder.path}, and load_dir={load_dir} from one that "
            "is given there; leave one of them out"
        )
    if arguments.resume:
        found = find_checkpoint(run_folder.path, "latest", ranks, tell)
        if found:
            # What is to be loaded of `load_dir` was loaded when the run began.
            return ResumePoint(
                *found, arguments.load_optim or bool(load_dir), arguments.load_rng or bool(load_dir), own=True
            )
    if load_dir is None:
        return None
    found = find_checkpoint(Path(load_dir), arguments.load_type, ranks, tell)
    if found is None:
        raise ValueError(f"load_dir {load_dir} holds no checkpoint")
    return ResumePoint(*found, arguments.load_optim, arguments.load_rng, own=loads_own)


def _open_folder(folder: RunFolder, start: ResumePoint | None, arguments: TrainingArguments) -> None:
    step = folder.latest_step()
    own = start if start and start.own else None
    if own and not own.optimizer:
        raise ValueError(
            f"load_optim=False begins at step 0, and {folder.path} holds a run that is saved at step {step}; "
            "choose another save_dir or experiment_name"
        )
    if step is not None and not own:
        raise ValueError(
            f"{folder.path} holds a run that is saved at step {step}; go on with it by resume=True, or choose "
            "another save_dir or experiment_name"
        )
    _make_folder(folder.path, "the run's folder")
    if arguments.tensorboard_dir is not None:
        _make_folder(Path(arguments.tensorboard_dir), "tensorboard_dir")
    folder.sweep()
    if own:
        folder.forget_after(own.state.step, evaluated=own.state.validation.get("step") == own.state.step)
        if own.state.best.get("name") == arguments.save_best:
            folder.restore_best(own.state.best)
    else:
        folder.forget_metrics_after(0)  # of a run that was killed before its first checkpoint


def _make_folder(path: Path, meaning: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{path} cannot be {meaning}, for a file is there; name another") from None
