"""Writes a destination folder so that it appears complete or not at all.

Everything is written into `.NAME.partial` beside it, with the weights under names that nothing loads. At the end the
files get their final names, the manifest is written last, and the folder is renamed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.folder_files import write_state_file
from ..checkpoint.manifest import MANIFEST, Manifest
from ..checkpoint.planned_file import PlannedFile
from ..files.durable import sync
from .journal import JOURNAL, PARTIAL, Journal, check_unused


class Destination:
    """A folder to be written: `folder` is its final name, `work` the folder in which its files are written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder.parent / f".{folder.name}{PARTIAL}"
        self._replaced = folder.parent / f".{folder.name}.replaced"

    def check(self, source: Path, *, overwrite: bool, resume: bool) -> None:
        """Raises ValueError if writing would touch the source, or replace something without `overwrite`."""
        if overwrite and resume:
            raise ValueError(
                "--resume continues a conversion and --overwrite starts it again: use one of them"
            )
        here, there = self.folder.resolve(), source.resolve()
        if not self.folder.name or here == there or here in there.parents or there in here.parents:
            raise ValueError(
                f"{self.folder} and the source {source} must be two folders, neither inside the other"
            )
        if not self.folder.parent.is_dir():
            raise ValueError(
                f"the folder {self.folder.parent} does not exist; create it before {self.folder.name}"
            )
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise ValueError(f"{self.folder} exists and is not a folder; name another destination")
        if self.work.is_symlink() or (self.work.exists() and not self.work.is_dir()):
            raise ValueError(
                f"{self.work} exists and is not a folder, but the conversion needs that name; remove it"
            )
        if self.folder.exists() and any(self.folder.iterdir()):
            if not overwrite and not resume:
                raise ValueError(
                    f"{self.folder} exists; replace it with --overwrite, or name another folder"
                )
            if overwrite and not any(
                (self.folder / name).exists() for name in (MANIFEST, "config.json", "latest")
            ):
                raise ValueError(
                    f"{self.folder} holds no model, so it is not replaced; name another folder"
                )
        if self.work.exists() and not overwrite and not resume:
            raise ValueError(
                f"{self.work} is left from an interrupted conversion; continue it with --resume, or start again with "
                f"--overwrite"
            )

    def is_complete(self) -> bool:
        """Returns whether the folder exists with its contents, and no unfinished conversion to it."""
        return self.folder.exists() and any(self.folder.iterdir()) and not self.work.exists()

    def begin(self, files: Sequence[PlannedFile], fingerprint: str, *, overwrite: bool) -> Journal:
        """Makes or reopens the work folder with its files at full size.

        Raises ValueError if the disk is too full, or if another process or a conversion with another fingerprint uses
        the work folder. `overwrite` removes what an interrupted conversion wrote.
        """
        if overwrite and self.work.exists():
            check_unused(self.work)
            shutil.rmtree(self.work)
        resumed = self.work.exists()
        self.work.mkdir(exist_ok=True)
        journal = Journal(self.work, fingerprint)
        try:
            (self.work / MANIFEST).unlink(missing_ok=True)
            for file in files:
                if (
                    self.work / file.name
                ).exists():  # a run was interrupted while it renamed the files
                    (self.work / file.name).rename(self.partial(file.name))
            missing = [file for file in files if not self._is_made(file)]
            self._check_space(sum(file.size for file in missing))
            for file in missing:
                self.partial(file.name).parent.mkdir(parents=True, exist_ok=True)
                file.create(self.partial(file.name))
        except (OSError, ValueError) as error:
            journal.close()
            if not resumed:
                self.abandon()
            message = _disk_message(error, self.folder) if isinstance(error, OSError) else error
            raise ValueError(message) from None
        return journal

    def partial(self, name: str) -> Path:
        """Returns the path of a weight file while it is being written."""
        return self.work / f"{name}{PARTIAL}"

    def finish(
        self,
        files: Sequence[PlannedFile],
        texts: Mapping[str, bytes | Path],
        manifest: Manifest | None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Flushes all files to the disk and gives them and the folder their final names.

        `texts` are small files by name: their contents, or a file to copy. The manifest, or else `config.json`, is
        written last; of a training checkpoint the `state`, which gets the digests of all files.
        """
        try:
            for file in files:
                file.complete(self.partial(file.name))
                sync(self.partial(file.name))
            for file in files:
                self.partial(file.name).rename(self.work / file.name)
                sync((self.work / file.name).parent)
            for name, content in sorted(texts.items(), key=lambda item: item[0] == "config.json"):
                (self.work / name).parent.mkdir(exist_ok=True)
                if isinstance(content, Path):
                    shutil.copyfile(content, self.work / name)
                else:
                    (self.work / name).write_bytes(content)
                sync(self.work / name)
            if manifest is not None:
                manifest.write(self.work)
            if state is not None:
                write_state_file(self.work, state)
            sync(self.work)
            shutil.rmtree(self._replaced, ignore_errors=True)
            if self.folder.exists():
                self.folder.rename(self._replaced)
            self.work.rename(self.folder)
            sync(self.folder.parent)
        except OSError as error:
            raise ValueError(_disk_message(error, self.folder)) from None
        self.tidy()

    def tidy(self) -> None:
        """Removes what a complete folder no longer needs."""
        (self.folder / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def abandon(self) -> None:
        """Removes the work folder, and restores the folder that was about to be replaced."""
        shutil.rmtree(self.work, ignore_errors=True)
        if self._replaced.exists() and not self.folder.exists():
            self._replaced.rename(self.folder)

    def _is_made(self, file: PlannedFile) -> bool:
        path = self.partial(file.name)
        if not path.is_file() or path.is_symlink() or path.stat().st_size != file.size:
            return False
        with path.open("rb") as made:
            return made.read(len(file.header)) == file.header

    def _check_space(self, needed: int) -> None:
        disk = os.statvfs(self.work)
        free = disk.f_bavail * disk.f_frsize
        if needed > free:
            raise ValueError(
                f"{self.folder} needs {needed:,} bytes, but its disk has {free:,} free; free {needed - free:,} more"
            )


def _disk_message(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk of {folder} is too full: {error.strerror}"
    return f"cannot write {error.filename or folder}: {error.strerror}"
