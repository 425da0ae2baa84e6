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
from ..trainer.run_folder import RunFolder
from .console import USAGE_ERROR, columns, exit_code_of, gigabytes, message_of
from .help import HelpPage, show_commands


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare every file of a run's checkpoints with its digest. Exit code 2 if one is damaged."""

    folder: Positional[Path]
    """The folder of a run, or one checkpoint."""
    json: bool = False
    """Print one JSON object instead of text."""


HELP = {"verify": HelpPage("shardzoo checkpoint verify", Verify)}


@dataclass(frozen=True)
class Verdict:
    """A checkpoint, what is wrong with it, and the files that an earlier version wrote without a
    digest.
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
    command = tyro.extras.subcommand_cli_from_dict(
        {"verify": Verify}, prog="shardzoo checkpoint", args=argv
    )
    return exit_code_of(lambda: report(command))


def report(command: Verify) -> int:
    """Prints what is found about each checkpoint. Raises ValueError if there is none."""
    folder = command.folder
    run = RunFolder(command.folder)
    one = (folder / STATE).exists() or (folder / STATE).is_symlink()
    found = [verdict(path) for path in ([folder] if one else map(run.checkpoint, run.steps()))]
    if not found:
        raise ValueError(
            f"{folder} holds no checkpoint; name the folder of a run, or one of its checkpoints"
        )
    if command.json:
        print(json.dumps({"checkpoints": [asdict(entry) for entry in found]}))
    else:
        rows = [
            (e.checkpoint, str(e.files), gigabytes(e.bytes), "damaged" if e.problems else "ok")
            for e in found
        ]
        print(columns(("checkpoint", "files", "size", "state"), rows), end="")
        for entry in found:
            for problem in entry.problems:
                print(printable(f"{entry.checkpoint}: {problem}"))
            if entry.without_digest:
                print(
                    printable(
                        f"{entry.checkpoint}: no digest was recorded of {', '.join(entry.without_digest)}"
                    )
                )
    return USAGE_ERROR if any(entry.problems for entry in found) else 0


def verdict(folder: Path) -> Verdict:
    """Returns what is found about one checkpoint."""
    files = list[Path]()
    problems = list[str]()
    recorded = set[str]()
    jobs = min(4, os.cpu_count() or 1)
    try:
        files = [entry for entry in sorted(folder.iterdir()) if entry.is_file()]
        recorded = {STATE, *read_state_file(folder)["files"]}
        with ThreadPoolExecutor(jobs) as pool:
            shares = pool.map(
                lambda share: list(find_changed_files(folder, share, jobs)), range(jobs)
            )
            problems = list(dict.fromkeys(problem for share in shares for problem in share))
    except (ValueError, OSError) as error:
        problems = problems or [message_of(error)]
    without = [] if problems else [file.name for file in files if file.name not in recorded]
    return Verdict(
        folder.name, len(files), sum(file.stat().st_size for file in files), problems, without
    )
