"""Cut a long text into documents at places that any worker finds alone, wherever it begins to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

HARD_CUT_BYTES = 1 << 20  # a text without any line end is cut about so often, between two characters


def text_pieces(file: BinaryIO, start: int, stop: int, block: int) -> Iterator[bytes]:
    """Pieces whose first byte lies in [start, stop), each about `block` bytes long.

    Every multiple of `block` offers one cut: behind the first blank line after it, else behind the first line
    end, within that block. A cut thus depends on the file alone. Pieces of adjoining ranges join to the whole
    file.
    """
    size = file.seek(0, 2)
    cut = _next_cut(file, start, block, size)
    while cut < min(stop, size):
        following = _next_cut(file, cut + 1, block, size)
        file.seek(cut)
        yield file.read(following - cut)
        cut = following


def _next_cut(file: BinaryIO, position: int, block: int, size: int) -> int:
    """First cut at or behind `position`; 0 and `size` are cuts."""
    if position <= 0:
        return 0
    number = max(0, (position - 1) // block)
    while number * block < size:
        cut = _cut_of_block(file, number, block) if number else 0
        if cut is not None and cut >= position:
            return min(cut, size)
        number += 1
    return size


def _cut_of_block(file: BinaryIO, number: int, block: int) -> int | None:
    first = number * block
    file.seek(first)
    raw = file.read(block)
    for separator in (b"\n\n", b"\r\n\r\n", b"\n"):
        found = raw.find(separator)
        if found >= 0:
            return first + found + len(separator)
    if number % max(1, HARD_CUT_BYTES // block):
        return None
    ahead = next((i for i, byte in enumerate(raw[:4]) if byte & 0xC0 != 0x80), 0)  # not inside a UTF-8 character
    return first + ahead
