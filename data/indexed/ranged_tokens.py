"""Reads the tokens of a pair in an object store, a block at a time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from ...files.working_copies import RangedFile

BLOCK_BYTES = 1 << 20
MOST_BLOCKS = 32  # in memory


class RangedTokens:
    """What an array of tokens on disk is for its readers: a length, slices, and elements by index.

    Attributes:
        dtype: The type of a token.
    """

    def __init__(self, file: RangedFile, dtype: np.dtype) -> None:
        self.dtype = dtype
        self._file = file
        self._blocks: OrderedDict[int, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return self._file.state[0] // self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return len(self) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._read(start, max(start, stop))[::step]
        if isinstance(index, np.ndarray):
            values = np.empty(index.shape, self.dtype)
            for place in np.ndindex(index.shape):
                values[place] = self[int(index[place])]
            return values
        place = int(index) % len(self)
        return self._read(place, place + 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._read(0, len(self)).astype(dtype or self.dtype)

    def _read(self, start: int, stop: int) -> np.ndarray:
        per_block = BLOCK_BYTES // self.dtype.itemsize
        values = np.empty(stop - start, self.dtype)
        done = start
        while done < stop:
            number, inside = divmod(done, per_block)
            part = self._find_block(number)[inside : inside + stop - done]
            values[done - start : done - start + len(part)] = part
            done += len(part)
        values.flags.writeable = False
        return values

    def _find_block(self, number: int) -> np.ndarray:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        first = number * BLOCK_BYTES
        block = np.frombuffer(self._file.read(first, first + BLOCK_BYTES), self.dtype)
        self._blocks[number] = block
        if len(self._blocks) > MOST_BLOCKS:
            self._blocks.popitem(last=False)
        return block
