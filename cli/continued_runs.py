"""Gives a command the saved arguments of the run that it continues."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..files.safe_paths import checked_file
from ..files.working_copies import name_urls
from ..trainer.arguments.training_arguments import LORA_OPTIONS
from ..trainer.launch.rank_process import is_restarted
from ..trainer.run_folder import RunFolder
from .arguments import given_value, read_yaml

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


def add_restart_options(argv: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Returns the command line of a job that is started again: it resumes its run, or begins it
    again if none is saved.

    The job has begun the run in its output folder before.
    """
    folder = given_value(argv, "output_dir") or values.get("output_dir")
    if folder is None or not is_restarted():
        return list(argv)
    if RunFolder.named(folder).latest_step() is None:
        return [*argv, "--overwrite"]
    return [*argv, "--resume", "--no-overwrite"]


def read_saved_values(
    kind: type, argv: Sequence[str], values: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the saved arguments of the run in the output folder, if the command line continues or
    evaluates it.

    Args:
        kind: The command's dataclass.
        argv: The command line, with `--resume` or `--eval-only` if it does.
        values: Those of its file.
    """

    def is_on(name: str) -> bool:
        value = given_value(argv, name) or str(values.get(name, False))
        return value.lower() == "true"

    resume = is_on("resume")
    folder = given_value(argv, "output_dir") or values.get("output_dir")
    if folder is None:
        if resume:
            raise ValueError("--resume continues the run in --output-dir: name that folder too")
        return None
    saved = RunFolder.named(folder).arguments_file
    if resume and not saved.exists():
        raise ValueError(f"--resume: {folder} holds no run; start one without --resume")
    if not saved.exists() or not (resume or is_on("eval_only")):
        return None
    found = read_yaml(kind, checked_file(saved.parent, saved.name))
    if not found:
        raise ValueError(
            f"{saved} is empty, so the run cannot go on; start a new one in another --output-dir"
        )
    if found.get("lora_rank") or found.get("adapter"):
        return found
    # Earlier releases took the options of LoRA weights without any, and ignored them.
    return {name: value for name, value in found.items() if name not in LORA_OPTIONS}


def check_unchanged(arguments: Any, before: Any, fixed: Sequence[str], option: str) -> None:
    """Raises ValueError if arguments differ from those of the run in a value that a run cannot
    change.

    Args:
        fixed: The names of such values.
        option: By which the run continues, for the message.
    """
    for name in fixed:
        value = getattr(before, name)
        now = getattr(arguments, name)
        if value != now:
            raise ValueError(
                f"{option}: the run has {name}={value}, which cannot change "
                f"to {now}; leave {name} out, or start a new run in another --output-dir"
            )


@contextmanager
def naming_how_to_resume(trainer: Trainer) -> Generator[None]:
    """Lets an interrupt in the context say what to type to go on, if the run has a checkpoint."""
    try:
        yield
    except KeyboardInterrupt:
        run = trainer.run_folder
        if run.latest_step() is None:
            raise
        folder = shlex.quote(name_urls(str(run.path)))
        raise KeyboardInterrupt(f"continue with --resume --output-dir {folder}") from None
