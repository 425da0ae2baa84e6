"""`shardzoo checkpoint`: checks the checkpoints of a training run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from ..checkpoint.folder_files import STATE, find_changed_files, read_state_file
from ..files.printable import printable
from ..files.working_copies import find_source
from ..trainer.run_folder import RunFolder
from .console import USAGE_ERROR, explain_error, format_bytes, format_table, run_and_report
from .help import HelpPage, show_commands
from .parsing import errors_in_one_line, list_fields


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare every file of a run's checkpoints with its digest. Exit code 2 if one is damaged."""

    folder: Positional[Path]
    """The folder of a run, or one checkpoint."""
    json: bool = False
    """Print one JSON object instead of text."""


HELP = {"verify": HelpPage("shardzoo checkpoint verify", Verify)}


@dataclass(frozen=True)
class CheckpointState:
    """What is found about a checkpoint.

    Attributes:
        checkpoint: The name of its folder.
        files: The number of files.
        bytes: Their size.
        problems: What is wrong with it; empty if nothing is.
        without_digest: The files that an earlier version wrote without a digest.
    """

    checkpoint: str
    files: int
    bytes: int
    problems: list[str]
    without_digest: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 after a user's error or if a checkpoint is damaged."""
    argv = sys.argv[1:] if argv is None else argv
    show_commands("shardzoo checkpoint", "Checks the checkpoints of a training run.", HELP, argv)
    with errors_in_one_line():
        command = tyro.extras.subcommand_cli_from_dict(
            {"verify": Verify}, prog="shardzoo checkpoint", args=argv
        )
    return run_and_report(lambda: report(command), options=list_fields(Verify))


def report(command: Verify) -> int:
    """Prints what is found about each checkpoint. Raises ValueError if there is none."""
    folder = find_source(command.folder) or command.folder
    if (folder / STATE).exists() or (folder / STATE).is_symlink():
        checkpoints = [folder]
    else:
        run = RunFolder(folder)
        checkpoints = [run.checkpoint(step) for step in run.steps()]
    found = [examine(checkpoint) for checkpoint in checkpoints]
    if not found:
        raise ValueError(
            f"{folder} holds no checkpoint; name the folder of a run, or one of its checkpoints"
        )
    if command.json:
        print(json.dumps({"checkpoints": [asdict(entry) for entry in found]}))
    else:
        rows: list[tuple[str, ...]] = []
        for entry in found:
            state = "damaged" if entry.problems else "ok"
            rows.append((entry.checkpoint, str(entry.files), format_bytes(entry.bytes), state))
        print(format_table(("checkpoint", "files", "size", "state"), rows), end="")
        for entry in found:
            for problem in entry.problems:
                print(printable(f"{entry.checkpoint}: {problem}"))
            if entry.without_digest:
                names = ", ".join(entry.without_digest)
                print(printable(f"{entry.checkpoint}: no digest was recorded of {names}"))
    return USAGE_ERROR if any(entry.problems for entry in found) else 0


def examine(folder: Path) -> CheckpointState:
    """Compares the files of one checkpoint with their digests."""
    files: list[Path] = []
    problems: list[str] = []
    recorded: set[str] = set()
    jobs = min(4, os.cpu_count() or 1)

    def find_problems(share: int) -> list[str]:
        return list(find_changed_files(folder, share, jobs))

    try:
        files = [entry for entry in sorted(folder.iterdir()) if entry.is_file()]
        recorded = {STATE, *read_state_file(folder)["files"]}
        with ThreadPoolExecutor(jobs) as pool:
            for found in pool.map(find_problems, range(jobs)):
                problems += [problem for problem in found if problem not in problems]
    except (ValueError, OSError) as error:
        problems = problems or [explain_error(error)]
    without_digest: list[str] = []
    if not problems:
        without_digest = [file.name for file in files if file.name not in recorded]
    nbytes = sum(file.stat().st_size for file in files)
    return CheckpointState(folder.name, len(files), nbytes, problems, without_digest)
