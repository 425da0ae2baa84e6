"""Hashes files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from .working_copies import close_file, open_for_reading, read_at

BLOCK_BYTES = 1 << 20


def hash_file(path: Path, ranges: Iterable[tuple[int, int]] | None = None) -> str:
    """Returns the sha256 of a file, or of ranges of its bytes one after another.

    Args:
        path: The file.
        ranges: (first byte, end) of each range; by default the whole file.
    """
    digest = hashlib.sha256()
    file = open_for_reading(path)
    try:
        for first, end in ranges or [(0, path.stat().st_size)]:
            position = first
            while position < end:
                block = read_at(file, position, min(BLOCK_BYTES, end - position))
                if not block:  # The file is shorter than the range.
                    break
                digest.update(block)
                position += len(block)
    finally:
        close_file(file)
    return digest.hexdigest()
