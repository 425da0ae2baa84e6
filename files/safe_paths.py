"""Refuses paths that lead out of a folder, or to something other than they should."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def checked_file(folder: Path, name: str) -> Path:
    """Returns `folder / name` after checking that it is a regular file of this folder.

    A symbolic link may point to a file of the folder itself, or into the `blobs` of a Hugging Face
    cache, whose snapshots are made of such links: the repository's own blobs, or those that all
    repositories of the cache share (`hub/blobs/ab/abcd…`).

    Raises:
        ValueError: The name is not a plain file name, or the file is missing, is not a regular
            file, or lies outside the folder.
    """
    if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name:
        raise ValueError(
            f"{folder} names a file {name!r}; a model's files must be in its own folder"
        )
    path = folder / name
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except RuntimeError as error:  # Python 3.12 and older report a loop of links this way.
        raise ValueError(f"cannot read {path}: {error}") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a regular file")
    home = folder.resolve()
    cache_blobs = home.parent.parent / "blobs"
    shared_blobs = None
    if home.parent.name == "snapshots" and len(home.parents) > 2:
        shared_blobs = home.parents[2] / "blobs"
    if real.parent not in (home, cache_blobs) and real.parent.parent != shared_blobs:
        raise ValueError(
            f"{path} is a link out of its folder, to {real}; copy the file into the folder first"
        )
    return path


def is_named(descriptor: int, path: Path) -> bool:
    """Returns whether a path still names an open file.

    A lock is worth nothing if it is of a file that another process has renamed or replaced between
    the opening and the locking.
    """
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), named)
