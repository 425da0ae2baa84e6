"""Writes a destination folder so that it appears complete or not at all.

Everything is written into `.NAME.partial` beside it, with the weights under names that nothing
loads. At the end the files get their final names, the manifest is written last, and the folder is
renamed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.folder_files import CONFIG, write_state_file
from ..checkpoint.manifest import MANIFEST, Manifest
from ..checkpoint.planned_file import PlannedFile
from ..files.durable import sync
from ..files.working_copies import find_work, locate, mark_pending, pull, push
from .journal import JOURNAL, PARTIAL, Journal, check_unused


class Destination:
    """A folder to be written. That of a URL is written as a local copy, which is then sent.

    Attributes:
        folder: Its final name.
        work: The folder in which its files are written.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = find_work(folder)
        self.folder = folder
        self.work = folder.parent / f".{folder.name}{PARTIAL}"
        self._replaced = folder.parent / f".{folder.name}.replaced"
        self._is_finished = False

    def check(self, source: Path, *, overwrite: bool, resume: bool) -> None:
        """Checks that the folder may be written.

        Raises:
            ValueError: Writing would touch the source, or replace something without `overwrite`.
        """
        folder = self.folder
        if overwrite and resume:
            raise ValueError(
                "--resume continues a conversion and --overwrite starts it again: use one of them"
            )
        pull(folder)
        here = locate(folder)
        there = locate(source)
        if not folder.name or here == there or here in there.parents or there in here.parents:
            raise ValueError(
                f"{folder} and the source {source} must be two folders, neither inside the other"
            )
        if not folder.parent.is_dir():
            raise ValueError(
                f"the folder {folder.parent} does not exist; create it before {folder.name}"
            )
        if _is_no_folder(folder):
            raise ValueError(f"{folder} exists and is not a folder; name another destination")
        if _is_no_folder(self.work):
            raise ValueError(
                f"{self.work} exists and is not a folder, but the conversion needs that name; "
                f"remove it"
            )
        if folder.exists() and any(folder.iterdir()):
            if not overwrite and not resume:
                raise ValueError(
                    f"{folder} exists; replace it with --overwrite, or name another folder"
                )
            marks = (MANIFEST, CONFIG, "latest")
            if overwrite and not any((folder / name).exists() for name in marks):
                raise ValueError(
                    f"{folder} holds no model, so it is not replaced; name another folder"
                )
        if self.work.exists() and not overwrite and not resume:
            raise ValueError(
                f"{self.work} is left from an interrupted conversion; "
                f"continue it with --resume, or start again with --overwrite"
            )

    def is_complete(self) -> bool:
        """Returns whether the folder has its contents, and no unfinished conversion to it."""
        return self.folder.exists() and any(self.folder.iterdir()) and not self.work.exists()

    def begin(self, files: Sequence[PlannedFile], fingerprint: str, *, overwrite: bool) -> Journal:
        """Makes or reopens the work folder with its files at full size.

        Args:
            files: The weight files.
            fingerprint: That of the conversion.
            overwrite: Whether to remove what an interrupted conversion wrote.

        Raises:
            ValueError: The disk is too full, or another process or a conversion with another
                fingerprint uses the work folder.
        """
        if overwrite and self.work.exists():
            check_unused(self.work)
            shutil.rmtree(self.work)
        is_resumed = self.work.exists()
        self.work.mkdir(exist_ok=True)
        journal = Journal(self.work, fingerprint)
        try:
            (self.work / MANIFEST).unlink(missing_ok=True)
            # A run may have been interrupted while it gave the files their final names.
            for file in files:
                if (self.work / file.name).exists():
                    (self.work / file.name).rename(self.partial(file.name))
            missing = [file for file in files if not self._is_created(file)]
            self._check_space(sum(file.size for file in missing))
            for file in missing:
                path = self.partial(file.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                file.create(path)
        except (OSError, ValueError) as error:
            journal.close()
            if not is_resumed:
                self.abandon()
            message = str(error)
            if isinstance(error, OSError):
                message = _explain_disk_error(error, self.folder)
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

        The manifest, or else `config.json`, is written last; of a training checkpoint the state.

        Args:
            files: The weight files.
            texts: Small files by name: their contents, or a file to copy.
            manifest: That of a folder of shards.
            state: That of a training checkpoint, which gets the digests of all files.
        """
        try:
            for file in files:
                file.complete(self.partial(file.name))
                sync(self.partial(file.name))
            for file in files:
                self.partial(file.name).rename(self.work / file.name)
                sync((self.work / file.name).parent)
            for name in sorted(texts, key=lambda name: name == CONFIG):
                self._write_text(name, texts[name])
            if manifest is not None:
                manifest.write(self.work)
            if state is not None:
                write_state_file(self.work, state)
            sync(self.work)

            mark_pending(self.folder)
            # Only now is the folder of before set aside, so there is always one of the two.
            shutil.rmtree(self._replaced, ignore_errors=True)
            if self.folder.exists():
                self.folder.rename(self._replaced)
            self.work.rename(self.folder)
            sync(self.folder.parent)
        except OSError as error:
            raise ValueError(_explain_disk_error(error, self.folder)) from None
        self._is_finished = True
        self.tidy()

    def _write_text(self, name: str, content: bytes | Path) -> None:
        path = self.work / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, path)
        else:
            path.write_bytes(content)
        sync(path)

    def tidy(self) -> None:
        """Removes what a complete folder no longer needs, and sends it to its store, if it has one."""
        (self.folder / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(self._replaced, ignore_errors=True)
        try:
            push(self.folder)
        except OSError as error:
            raise ValueError(
                f"cannot write {error.filename}: {error.strerror}; continue with --resume"
            ) from None

    def abandon(self) -> None:
        """Removes the work folder, and restores the folder that was about to be replaced.

        A finished folder that could not be sent stays, for another attempt.
        """
        if self._is_finished:
            return
        shutil.rmtree(self.work, ignore_errors=True)
        if self._replaced.exists() and not self.folder.exists():
            self._replaced.rename(self.folder)

    def _is_created(self, file: PlannedFile) -> bool:
        """Returns whether an interrupted run has created this file as it is planned."""
        path = self.partial(file.name)
        if not path.is_file() or path.is_symlink() or path.stat().st_size != file.size:
            return False
        with path.open("rb") as existing:
            return existing.read(len(file.header)) == file.header

    def _check_space(self, needed: int) -> None:
        disk = os.statvfs(self.work)
        free = disk.f_bavail * disk.f_frsize
        if needed > free:
            raise ValueError(
                f"{self.folder} needs {needed:,} bytes, but its disk has {free:,} free; "
                f"free {needed - free:,} more"
            )


def _is_no_folder(path: Path) -> bool:
    """Returns whether a path has something other than a folder, such as a file or a link."""
    return path.is_symlink() or (path.exists() and not path.is_dir())


def _explain_disk_error(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk of {folder} is too full: {error.strerror}"
    return f"cannot write {error.filename or folder}: {error.strerror}"
