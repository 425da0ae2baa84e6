"""Manages the folder of a run: the paths of its files, and the rule that two runs never share a
folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from ..files.durable import write_durably
from ..files.strict_json import read_regular_file
from ..files.working_copies import find_work, locate, pull
from .run_lock import LOCK, find_user

BEST = "best"  # a file that names the best checkpoint
STEP_FOLDER = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,17})")
NEW_DATA = ".data.partial"
NEW_ARGUMENTS = ".arguments.yaml.partial"
# A process that was killed while it prepared a run leaves nothing else.
BEFORE_RUN = (LOCK, NEW_DATA, NEW_ARGUMENTS)
# What runs write into their folder, besides checkpoints.
OWN = (
    NEW_DATA,
    NEW_ARGUMENTS,
    "arguments.yaml",
    "commands.jsonl",
    "metrics.jsonl",
    "metrics.partial",
    ".metrics.jsonl.partial",
    "tensorboard",
    "wandb",
    "loss.png",
    "data",
    "tokenizer",
    "hf",
    ".hf.shards",
    ".hf.partial",
    "report.html",
    "trace.json",
    "trackers.json",
    "comet",
)
OWN_CHECKPOINT = re.compile(
    r"\.?step-\d{6,}(\.(partial|deleted|abandoned\d*))?"
    r"|\.(merged|\.merged\.partial|best\.partial)"
    r"|best"
)


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run. The most important ones are:

    - `arguments.yaml`: every argument, in the format that `--config` reads.
    - `commands.jsonl`: the command lines that have trained the run, each with its first step.
    - `metrics.jsonl`: a line for each logged step.
    - `checkpoints/step-NNNNNN`: complete training checkpoints.
    - `data/`: the prepared corpus and its tokenizer.
    """

    path: Path

    @classmethod
    def named(cls, name: str | Path) -> RunFolder:
        """Returns the folder of a name: a path, or the URL of one in an object store.

        Of a URL it is the local copy, which is as the store unless a run on this machine uses it.
        """
        path = find_work(name)
        pull(path, largest=sys.maxsize, unless=LOCK)
        return cls(path)

    @property
    def arguments_file(self) -> Path:
        return self.path / "arguments.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def commands_file(self) -> Path:
        return self.path / "commands.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def owns(self, path: Path) -> bool:
        """Returns whether `path` is this folder or one of its checkpoints."""
        path = locate(path)
        is_step = STEP_FOLDER.fullmatch(path.name) and path.parent == locate(self.checkpoints)
        return bool(is_step) or path == locate(self.path)

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, in order."""
        if not self.checkpoints.is_dir():
            return []
        steps: list[int] = []
        for entry in self.checkpoints.iterdir():
            name = STEP_FOLDER.fullmatch(entry.name)
            if name:
                steps.append(int(name[1]))
        return sorted(steps)

    def latest_step(self) -> int | None:
        """Returns the last step with a complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def best_checkpoint(self) -> Path | None:
        """Returns the checkpoint of the last call to `name_best`, if it exists."""
        try:
            text = read_regular_file(self.checkpoints / BEST, largest=1 << 10)
        except (FileNotFoundError, NotADirectoryError):
            return None
        name = text.decode(errors="replace").strip()
        folder = self.checkpoints / name
        if not STEP_FOLDER.fullmatch(name) or not folder.is_dir():
            return None
        return folder

    def name_best(self, folder: Path) -> None:
        """Records that a checkpoint is the best one so far."""
        write_durably(self.checkpoints / BEST, folder.name + "\n")

    def restore_best(self, best: dict[str, Any]) -> None:
        """Names the best checkpoint of a `TrainerState` again; the run may have been killed before
        it was named.
        """
        folder = self.checkpoint(int(best.get("step", 0)))
        if folder.is_dir():
            self.name_best(folder)

    def prune(self, keep: int | None) -> None:
        """Deletes all but the last `keep` checkpoints and the best one.

        Each is renamed before it is deleted.
        """
        if not keep:
            return
        for step in self.steps()[:-keep]:
            folder = self.checkpoint(step)
            if folder == self.best_checkpoint():
                continue
            deleted = folder.with_name(f".{folder.name}.deleted")
            shutil.rmtree(deleted, ignore_errors=True)
            folder.rename(deleted)
            shutil.rmtree(deleted, ignore_errors=True)

    def first_step(
        self, *, resume: bool, overwrite: bool, reads: Iterable[str | Path | None] = ()
    ) -> int:
        """Returns the step at which a run in this folder begins: 0 for a new run. Changes nothing.

        Raises:
            ValueError: The folder holds another run, but neither `resume` nor `overwrite` is set;
                or `overwrite` would delete what the run `reads`; or the folder holds files that do
                not belong to a run; or there is nothing to resume.
        """
        if resume and overwrite:
            raise ValueError("--resume continues a run and --overwrite deletes it: use one of them")
        step = self.latest_step()
        if resume:
            user = find_user(self.path) if step is None else None
            if user is not None:
                raise ValueError(
                    f"--resume: the run in {self.path} goes on in {user}, and has saved no "
                    "checkpoint yet; wait for it, or end it"
                )
            if step is None:
                instead = "start one"
                if self.arguments_file.exists():
                    instead = "start again with --overwrite"
                raise ValueError(
                    f"--resume: {self.path} holds no complete checkpoint; {instead} without "
                    "--resume"
                )
            return step
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"output_dir {self.path} is a file; name a folder")
        if not self.path.is_dir() or all(entry.name in BEFORE_RUN for entry in self.path.iterdir()):
            return 0
        if not self.arguments_file.exists():
            raise ValueError(
                f"output_dir {self.path} holds files that do not belong to a run; choose another "
                "folder"
            )
        if not overwrite:
            reached = "with nothing saved yet"
            resume_it = ""
            if step is not None:
                reached = f"saved at step {step}"
                resume_it = "resume it with --resume, "
            user = find_user(self.path)
            if user is not None:
                raise ValueError(
                    f"output_dir {self.path} holds a run that goes on in {user} ({reached}); choose "
                    "another --output-dir, or end it first"
                )
            raise ValueError(
                f"output_dir {self.path} holds another run ({reached}); {resume_it}replace it "
                "with --overwrite, or choose another --output-dir"
            )
        for path in filter(None, reads):
            if locate(path).is_relative_to(locate(self.path)):
                raise ValueError(
                    f"--overwrite would delete {path}, which this run reads; choose another "
                    "--output-dir"
                )
        return 0

    def own_files(self) -> list[Path]:
        """Returns the files and folders here that runs write.

        Other files in the folder are the user's.
        """
        entries = [self.path / name for name in OWN]
        if self.checkpoints.is_dir():
            for entry in self.checkpoints.iterdir():
                if OWN_CHECKPOINT.fullmatch(entry.name):
                    entries.append(entry)
        return [entry for entry in entries if os.path.lexists(entry)]

    def clear(self, keep: Path | None = None) -> None:
        """Deletes `own_files`, except `keep`.

        The arguments are deleted last: without them, what is left would be taken for files of the
        user, which no run may overwrite.
        """
        for entry in sorted(self.own_files(), key=lambda entry: entry == self.arguments_file):
            if entry != keep:
                remove(entry)
        is_own_folder = self.checkpoints.is_dir() and not self.checkpoints.is_symlink()
        if is_own_folder and not any(self.checkpoints.iterdir()):
            self.checkpoints.rmdir()

    @contextmanager
    def new_data(self) -> Generator[Path]:
        """Yields the path of a folder to prepare a corpus in, for `begin`; what is left there is
        deleted.
        """
        path = self.path / NEW_DATA
        shutil.rmtree(path, ignore_errors=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def begin(self, arguments: dict[str, object], data: Path) -> None:
        """Replaces the files of an earlier run with a new run's, and moves the prepared corpus
        `data` here.
        """
        self.clear(keep=data)
        self.record_arguments(arguments)
        data.rename(self.data)

    def record_arguments(self, arguments: dict[str, object]) -> None:
        """Writes the arguments of a run; a full disk leaves those of before."""
        write_durably(self.arguments_file, yaml.safe_dump(arguments, sort_keys=False))

    def record_command(self, step: int, command: str) -> None:
        """Records the command line that trains from `step` on.

        Those of later steps, which are not in the run any more, are removed.
        """
        kept = [record for record in self.commands() if record["step"] < step]
        kept.append({"step": step, "command": command})
        write_durably(self.commands_file, "".join(json.dumps(record) + "\n" for record in kept))

    def commands(self) -> list[dict[str, Any]]:
        """Returns the command lines that have trained the run, as `step` and `command`, in order.

        An earlier release has recorded none.
        """
        if not self.commands_file.exists():
            return []
        lines = self.commands_file.read_text(errors="replace").splitlines()
        records = [record for line in lines if (record := parse_metrics_line(line))]
        return [record for record in records if isinstance(record.get("command"), str)]

    def drop_after(self, step: int, *, evaluated: bool) -> None:
        """Removes the metrics after `step`, and renames later checkpoints, which are damaged or no
        longer in the run.

        If `step` has not been `evaluated`, the logged values of its evaluation are removed too.
        """
        self.drop_metrics_after(step, evaluated=evaluated)
        for later in self.steps():
            if later <= step:
                continue
            folder = self.checkpoint(later)
            abandoned = folder.with_name(f"{folder.name}.abandoned")
            for number in count(1):
                if not abandoned.exists():
                    break
                abandoned = folder.with_name(f"{folder.name}.abandoned{number}")
            folder.rename(abandoned)

    def drop_metrics_after(self, step: int, *, evaluated: bool = True) -> None:
        """Removes the metrics after `step`, and a final evaluation's, because the run goes on."""
        if not self.metrics_file.exists():
            return
        kept = []
        for record in self.metrics():
            is_final = any(name.startswith("final/") for name in record)
            is_evaluation = any(name.startswith("valid/") for name in record)
            if is_final or record["step"] > step:
                continue
            if record["step"] == step and is_evaluation and not evaluated:
                continue
            kept.append(record)
        write_durably(self.metrics_file, "".join(json.dumps(record) + "\n" for record in kept))

    def delete_unfinished(self) -> None:
        """Deletes the remains of checkpoints that killed processes were writing or deleting."""
        partial = self.checkpoints.glob(".step-*.partial")
        deleted = self.checkpoints.glob(".step-*.deleted")
        for remains in [*partial, *deleted]:
            with suppress(OSError):
                remove(remains)

    def metrics(self) -> list[dict[str, float]]:
        """Returns the logged values, one dict a step.

        Skips a line that a crash has truncated or damaged.
        """
        if not self.metrics_file.exists():
            return []
        records: list[dict[str, float]] = []
        for line in self.metrics_file.read_text(errors="replace").splitlines():
            record = parse_metrics_line(line)
            if record:
                records.append(record)
        return records


def parse_metrics_line(line: str | bytes) -> dict[str, Any] | None:
    """Returns the values of a line of `metrics.jsonl`, or None if a crash has truncated or damaged
    it.
    """
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and type(record.get("step")) is int:
            return record
    return None


def remove(path: Path) -> None:
    """Deletes a file or a folder; of a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_run_folder(model: str) -> Path:
    """Creates runs/MODEL-TIME, with a number appended if a run that started in the same second has
    that name.

    The model in another run's folder, RUN/hf, is called RUN.
    """
    path = Path(model)
    name = path.parent.name if path.name == "hf" and path.parent.name else path.name
    named = Path("runs", f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
    named.parent.mkdir(exist_ok=True)
    folder = named
    for number in count(2):
        try:
            folder.mkdir()
            break
        except FileExistsError:
            folder = named.with_name(f"{named.name}-{number}")
    return folder
