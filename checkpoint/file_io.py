"""Reading and writing byte ranges of files, whole or not at all, with the tensor in every error."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from .stored_tensor import StoredTensor

ZEROS = bytes(1 << 16)


class OpenFiles:
    """Open files by path, closed together; a path is opened once."""

    def __init__(self, opener: Callable[[Path], int]) -> None:
        self._opener = opener
        self._descriptors: dict[Path, int] = {}

    def open(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if path not in self._descriptors:
                self._descriptors[path] = self._opener(path)

    def __getitem__(self, path: Path) -> int:
        return self._descriptors[path]

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def open_for_reading(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data


def read_into(tensor: StoredTensor, descriptor: int, start: int, buffer: np.ndarray) -> None:
    """Fills a contiguous buffer with the tensor's bytes from `start`. ValueError where the file ends before."""
    view = bytes_of(buffer)
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], tensor.offset + start + done)
        except OSError as error:
            raise ValueError(f"cannot read {tensor}: {error.strerror}") from None
        if count == 0:
            raise ValueError(f"{tensor} ends early: the file was cut while it was read")
        done += count


def read_bytes(tensor: StoredTensor, descriptor: int, start: int, count: int) -> bytes:
    """`count` of the tensor's bytes from `start`."""
    content = np.empty(count, np.uint8)
    read_into(tensor, descriptor, start, content)
    return content.tobytes()


def write_all(tensor: StoredTensor, descriptor: int, start: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(descriptor, data[done:], tensor.offset + start + done)
        except OSError as error:
            raise ValueError(f"cannot write {tensor}: {error.strerror}") from None


def hash_stored(tensor: StoredTensor, descriptor: int, chunk: int) -> str:
    """sha256 of a stored tensor's bytes."""
    digest = hashlib.sha256()
    buffer = np.empty(min(chunk, max(tensor.nbytes, 1)), np.uint8)
    for start in range(0, tensor.nbytes, len(buffer)):
        part = buffer[: min(len(buffer), tensor.nbytes - start)]
        read_into(tensor, descriptor, start, part)
        digest.update(bytes_of(part))
    return digest.hexdigest()


class Input:
    """A stored tensor that is read in the order of its bytes; what is passed over is read for its hash only.

    expected: the recorded sha256, which `finish` compares; None if there is none.
    """

    def __init__(self, tensor: StoredTensor, descriptor: int, expected: str | None) -> None:
        self.tensor, self._descriptor, self._expected = tensor, descriptor, expected
        self._digest = hashlib.sha256() if expected else None
        self._position = 0

    def read(self, start: int, buffer: np.ndarray) -> None:
        """buffer: contiguous, any type; `start` in bytes."""
        if self._digest is not None:
            self._pass_over(start)
        read_into(self.tensor, self._descriptor, start, buffer)
        if self._digest is not None and buffer.nbytes:
            self._digest.update(bytes_of(buffer))
        self._position = start + buffer.nbytes

    def finish(self) -> None:
        """ValueError if the tensor's bytes are not those whose hash was recorded."""
        if self._digest is not None:
            self._pass_over(self.tensor.nbytes)
            check_hash(self.tensor, self._digest.hexdigest(), self._expected)

    def _pass_over(self, stop: int) -> None:
        assert self._digest is not None
        assert stop >= self._position, f"{self.tensor} is read backwards"
        while self._position < stop:
            skipped = np.empty(min(stop - self._position, len(ZEROS)), np.uint8)
            read_into(self.tensor, self._descriptor, self._position, skipped)
            self._digest.update(bytes_of(skipped))
            self._position += skipped.nbytes


def check_hash(tensor: StoredTensor, found: str, expected: str | None) -> None:
    if expected is not None and found != expected:
        raise ValueError(f"{tensor} is damaged: its sha256 is {found[:16]}…, the manifest says {expected[:16]}…")


class Output(Protocol):
    """Where a stored tensor, or equal ones in several files, receive their bytes in order."""

    tensors: Sequence[StoredTensor]

    def write(self, start: int, data: np.ndarray) -> None:
        """data: contiguous, any type; `start` in bytes. What was passed over is padding, hence zeros."""
        ...

    def finish(self) -> str:
        """Pads to the end and returns the sha256."""
        ...


class Writer:
    """Writes to one or several files and hashes once."""

    def __init__(self, tensors: Sequence[StoredTensor], files: Mapping[Path, int] | OpenFiles) -> None:
        self.tensors = tensors
        self._targets = [(tensor, files[tensor.file]) for tensor in tensors]
        self._digest = hashlib.sha256()
        self._position = 0

    def write(self, start: int, data: np.ndarray) -> None:
        self._pad(start)
        if data.nbytes:
            self._put(bytes_of(data))

    def finish(self) -> str:
        self._pad(self.tensors[0].nbytes)
        return self._digest.hexdigest()

    def _pad(self, stop: int) -> None:
        assert stop >= self._position, f"{self.tensors[0]} is written backwards"
        while self._position < stop:
            self._put(memoryview(ZEROS)[: stop - self._position])

    def _put(self, data: memoryview) -> None:
        for tensor, descriptor in self._targets:
            write_all(tensor, descriptor, self._position, data)
        self._digest.update(data)
        self._position += len(data)


class Comparer:
    """Compares with what is there already, and remembers the tensors that differ. Padding is not compared."""

    def __init__(self, tensors: Sequence[StoredTensor], files: OpenFiles) -> None:
        self.tensors = tensors
        self.differing: dict[str, int] = {}  # tensor -> position of the first byte that differs
        self._targets = [(tensor, files[tensor.file]) for tensor in tensors]

    def write(self, start: int, data: np.ndarray) -> None:
        for tensor, descriptor in self._targets:
            found = np.empty(data.nbytes, np.uint8)
            read_into(tensor, descriptor, start, found)
            mine = data.reshape(-1).view(np.uint8)
            if str(tensor) not in self.differing and not np.array_equal(found, mine):
                self.differing[str(tensor)] = start + int(np.argmax(found != mine))

    def finish(self) -> str:
        return ""
