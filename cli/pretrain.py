"""Pretrain a causal language model of the zoo under DeepSpeed, its layers split over several processes.

Without arguments a small GPT-2 learns the source of the Python standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

# torch reads it at the first tensor. Huge pages speed up memory-bound work on a CPU.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import tyro

from ..data.objectives.pretraining import Objective
from ..pretraining.arguments import FIXED, PretrainingArguments, check_run
from ..trainer.launch.environment import end_process
from ..trainer.launch.launch import ensure_processes_of
from ..trainer.launch.rank_info import RankInfo
from ..trainer.run_folder import RunFolder
from .arguments import parse, read_yaml
from .rank_errors import exit_code_of_rank


@dataclass(frozen=True)
class PretrainCommand(PretrainingArguments):
    """The arguments of `pretrain.py`."""

    # its settings are read with the objectives' own names
    objective: tyro.conf.Suppress[Objective | None] = None
    config: Path | None = None
    """YAML file with values for these arguments; the command line takes precedence."""
    local_rank: Annotated[int, tyro.conf.arg(help="Set by launchers.")] = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 2 after a user's error, or the exit code of the process that failed first."""
    launch = RankInfo.from_environment()

    def work() -> int:
        arguments = read_arguments(sys.argv[1:] if argv is None else argv, quiet=not launch.is_first)
        config = check_run(arguments, launch)
        size = arguments.model_parallel_size
        if launch.world_size < size and not arguments.dry_run and not arguments.hostfile:
            print(f"--model-parallel-size {size} needs {size} processes; starting them on this machine")
        ensure_processes_of(arguments)
        from ..pretraining.recipe import Pretraining  # DeepSpeed takes seconds to import

        Pretraining(arguments, config, launch).run()
        return 0

    return exit_code_of_rank(work, launch)


def run_script() -> NoReturn:
    """Runs `main`, and ends the process with its exit code."""
    end_process(main())


def read_arguments(argv: Sequence[str], *, quiet: bool) -> PretrainCommand:
    """Returns the command line's arguments. With `--resume`, the run's saved arguments are the defaults."""
    describe = {"program": "pretrain.py", "description": __doc__ or "", "quiet": quiet}
    arguments = parse(PretrainCommand, argv, **describe)
    if not arguments.resume:
        return arguments
    if arguments.output_dir is None:
        raise ValueError("--resume continues the run in --output-dir: name that folder too")
    saved = RunFolder(Path(arguments.output_dir)).arguments_file
    if not saved.exists():
        raise ValueError(f"--resume: {arguments.output_dir} holds no run; start one without --resume")
    arguments = parse(PretrainCommand, argv, defaults=saved, **describe)
    before = PretrainCommand(**read_yaml(PretrainCommand, saved))
    for name in FIXED:
        if (value := getattr(before, name)) != (now := getattr(arguments, name)):
            raise ValueError(
                f"--resume: the run has {name}={value}, which cannot change to {now}; "
                f"leave {name} out, or start a new run in another --output-dir"
            )
    return arguments
