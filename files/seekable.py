"""The part of a file's interface that is the same for every reader that knows its size."""

from __future__ import annotations

import io
import os


class SeekableReader(io.RawIOBase):
    """A file that is read from `_position`; a subclass reads there, and moves it."""

    def __init__(self) -> None:
        self._position = 0

    def _find_size(self) -> int:
        """Returns the bytes of the whole file."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._find_size()}
        self._position = origins[whence] + offset
        return self._position
