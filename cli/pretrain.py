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

# Read when the first tensor is made: huge pages speed memory-bound work on a CPU up.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import tyro

from ..pretraining.arguments import FIXED, PretrainingArguments, check_run
from ..trainer.launch.environment import end_process
from ..trainer.launch.launch import ensure_processes_of
from ..trainer.launch.rank_info import RankInfo
from ..trainer.run_folder import RunFolder
from .arguments import parse, read_yaml
from .rank_errors import exit_code_of_rank


@dataclass(frozen=True)
class PretrainCommand(PretrainingArguments):
    """Everything `pretrain.py` can be told."""

    config: Path | None = None
    """YAML file with values for these arguments; the command line wins."""
    local_rank: Annotated[int, tyro.conf.arg(help="Set by launchers.")] = 0


def main(argv: Sequence[str] | None = None) -> int:
    """0: done. 2: refused, after a message on stderr. Else the exit code of the process that failed first."""
    launch = RankInfo.from_environment()

    def work() -> int:
        arguments = read_arguments(sys.argv[1:] if argv is None else argv, quiet=not launch.is_first)
        config = check_run(arguments, launch)
        size = arguments.model_parallel_size
        if launch.world_size < size and not arguments.dry_run and not arguments.hostfile:
            print(f"{launch.world_size} process for --model-parallel-size {size}: starting {size} on this machine")
        ensure_processes_of(arguments)
        from ..pretraining.recipe import Pretraining  # DeepSpeed takes seconds to import

        Pretraining(arguments, config, launch).run()
        return 0

    return exit_code_of_rank(work, launch)


def run_script() -> NoReturn:
    """`main` as the whole of a process."""
    end_process(main())


def read_arguments(argv: Sequence[str], *, quiet: bool) -> PretrainCommand:
    """The command line's arguments; with `--resume`, over those that the run was started with."""
    describe = {"program": "pretrain.py", "description": __doc__ or "", "quiet": quiet}
    arguments = parse(PretrainCommand, argv, **describe)
    if not arguments.resume:
        return arguments
    if arguments.output_dir is None:
        raise ValueError("--resume goes on with the run in --output-dir: name that folder too")
    saved = RunFolder(Path(arguments.output_dir)).arguments_file
    if not saved.exists():
        raise ValueError(f"--resume: {arguments.output_dir} holds no run; start one without --resume")
    arguments = parse(PretrainCommand, argv, defaults=saved, **describe)
    for name, value in read_yaml(PretrainCommand, saved).items():
        if name in FIXED and getattr(arguments, name) != value:
            raise ValueError(
                f"--resume: the run has {name}={value}, and {getattr(arguments, name)} would make it another run; "
                f"leave {name} out, or start a new run in another --output-dir"
            )
    return arguments
