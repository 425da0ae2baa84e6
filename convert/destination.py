"""A folder that appears complete or not at all.

Everything is written into `.NAME.partial` beside it, weights under names that nothing loads; then the files get
their names, the manifest comes last, and the folder is renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..checkpoint.manifest import MANIFEST, Manifest
from ..checkpoint.new_file import NewFile
from .journal import JOURNAL, Journal, check_unused

PARTIAL = ".partial"


class Destination:
    """folder: what will appear. work: where it is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder.parent / f".{folder.name}{PARTIAL}"
        self._replaced = folder.parent / f".{folder.name}.replaced"

    def check(self, source: Path, *, overwrite: bool, resume: bool) -> None:
        """ValueError if writing here would touch the source, or anything that was not asked to be replaced."""
        if overwrite and resume:
            raise ValueError("--resume goes on with a conversion and --overwrite starts over: use one of them")
        here, there = self.folder.resolve(), source.resolve()
        if not self.folder.name or here == there or here in there.parents or there in here.parents:
            raise ValueError(f"{self.folder} and the source {source} must lie beside each other, not in one another")
        if not self.folder.parent.is_dir():
            raise ValueError(f"there is no folder {self.folder.parent} to put {self.folder.name} into")
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise ValueError(f"{self.folder} exists and is no folder")
        if self.work.is_symlink() or (self.work.exists() and not self.work.is_dir()):
            raise ValueError(f"{self.work} is in the way")
        if self.folder.exists() and any(self.folder.iterdir()):
            if not overwrite and not resume:
                raise ValueError(f"{self.folder} exists; replace it with --overwrite, or name another folder")
            if overwrite and not any((self.folder / name).exists() for name in (MANIFEST, "config.json", "latest")):
                raise ValueError(f"{self.folder} holds no model, so it is not replaced; name another folder")
        if self.work.exists() and not overwrite and not resume:
            raise ValueError(
                f"{self.work} is left of an interrupted conversion; go on with it by --resume, or start over "
                f"with --overwrite"
            )

    def is_complete(self) -> bool:
        """Whether the folder is there and nothing of its making is left to do."""
        return self.folder.exists() and any(self.folder.iterdir()) and not self.work.exists()

    def begin(self, files: Sequence[NewFile], fingerprint: str, *, overwrite: bool) -> Journal:
        """Makes or reopens the work folder with its files at full size. ValueError if the disk is too full."""
        if overwrite and self.work.exists():
            check_unused(self.work)
            shutil.rmtree(self.work)
        resumed = self.work.exists()
        self.work.mkdir(exist_ok=True)
        journal = Journal(self.work, fingerprint)
        try:
            (self.work / MANIFEST).unlink(missing_ok=True)
            for file in files:
                if (self.work / file.name).exists():  # a run was interrupted while it gave the files their names
                    (self.work / file.name).rename(self.partial(file.name))
            missing = [file for file in files if not self._is_made(file)]
            self._check_space(sum(file.size for file in missing))
            for file in missing:
                self.partial(file.name).parent.mkdir(exist_ok=True)
                file.create(self.partial(file.name))
        except (OSError, ValueError) as error:
            journal.close()
            if not resumed:
                self.abandon()
            message = _disk_message(error, self.folder) if isinstance(error, OSError) else error
            raise ValueError(message) from None
        return journal

    def partial(self, name: str) -> Path:
        """The path of a weight file while it is written."""
        return self.work / f"{name}{PARTIAL}"

    def finish(
        self,
        files: Sequence[NewFile],
        texts: Mapping[str, bytes | Path],
        manifest: Manifest | None,
    ) -> None:
        """Makes everything durable and gives it its name; the manifest, or else config.json, comes last."""
        try:
            for file in files:
                file.complete(self.partial(file.name))
                _sync(self.partial(file.name))
            for file in files:
                self.partial(file.name).rename(self.work / file.name)
                _sync((self.work / file.name).parent)
            for name, content in sorted(texts.items(), key=lambda item: item[0] == "config.json"):
                if isinstance(content, Path):
                    shutil.copyfile(content, self.work / name)
                else:
                    (self.work / name).write_bytes(content)
                _sync(self.work / name)
            if manifest is not None:
                manifest.write(self.work)
            _sync(self.work)
            shutil.rmtree(self._replaced, ignore_errors=True)
            if self.folder.exists():
                self.folder.rename(self._replaced)
            self.work.rename(self.folder)
            _sync(self.folder.parent)
        except OSError as error:
            raise ValueError(_disk_message(error, self.folder)) from None
        self.tidy()

    def tidy(self) -> None:
        """Removes what a complete folder no longer needs."""
        (self.folder / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def abandon(self) -> None:
        """Leaves nothing behind."""
        shutil.rmtree(self.work, ignore_errors=True)
        if self._replaced.exists() and not self.folder.exists():
            self._replaced.rename(self.folder)

    def _is_made(self, file: NewFile) -> bool:
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)
