"""Reads, writes, hashes and compares the bytes of stored tensors; every error names the tensor."""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ..files.working_copies import OpenFile, RangedFile, close_file
from .dtypes import item_size
from .stored_tensor import StoredTensor, StridedTensor, WidenedTensor, read_file_state

ZEROS = bytes(1 << 16)
RANGE_BYTES = 2 << 20  # that one request to a store asks for; they are in memory twice
SPARE_FILES = 64  # descriptors left for what threads and libraries open besides


class OpenFiles:
    """Open files by path: descriptors, and objects of stores.

    Each path is opened once. Leaving the context closes all files.
    """

    def __init__(self, opener: Callable[[Path], OpenFile]) -> None:
        self._opener = opener
        self._descriptors: dict[Path, OpenFile] = {}

    def open(self, paths: Sequence[Path]) -> None:
        """Opens files.

        Raises:
            ValueError: The system's limit of open files is too low.
            OSError: As `os.open` raises it.
        """
        new = [path for path in dict.fromkeys(paths) if path not in self._descriptors]
        # Counting the open files of the process takes longer than reading a small tensor.
        if new:
            _allow_open_files(len(self._descriptors) + len(new))
        self._descriptors.update((path, self._opener(path)) for path in new)

    def __getitem__(self, path: Path) -> OpenFile:
        return self._descriptors[path]

    def sync(self) -> None:
        """Flushes what was written to the disk."""
        for descriptor in self._descriptors.values():
            if not isinstance(descriptor, RangedFile):
                os.fsync(descriptor)

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        opened = list(self._descriptors.values())
        self._descriptors.clear()
        for file in opened:
            close_file(file)
        ranged = [file for file in opened if isinstance(file, RangedFile)]
        if error is None:
            for file in ranged:
                file.check_unchanged()
        elif isinstance(error, ValueError | OSError):
            # What looks like damage may be parts of two versions of an object.
            with suppress(OSError):
                for file in ranged:
                    file.check_unchanged()


def _allow_open_files(count: int) -> None:
    """Raises the process's soft limit of open files if `count` more would exceed it."""
    needed = len(os.listdir("/dev/fd")) + count + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"{count:,} files must be open at once, but the limit is {hard:,}; "
            f"raise it with `ulimit -Hn`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def view_bytes(array: NDArray[Any]) -> memoryview:
    """Returns the bytes of a contiguous array without copying them."""
    return _flatten_to_bytes(array).data


def _flatten_to_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    # numpy leaves the type of `view` open.
    return cast(Any, array).reshape(-1).view(np.uint8)


def read_into(tensor: StoredTensor, descriptor: OpenFile, start: int, buffer: NDArray[Any]) -> None:
    """Fills a contiguous buffer with the tensor's bytes from byte `start` on.

    Raises:
        ValueError: The file cannot be read, ends too early, or is not the one whose header told
            where the tensor is: it was replaced or written in between.
    """
    if tensor.file_state not in (None, read_file_state(descriptor)):
        raise ValueError(f"{tensor.file} changed while it was being read; begin again")
    if isinstance(tensor, WidenedTensor):
        _read_widened(tensor, descriptor, start, buffer)
        return
    if isinstance(tensor, StridedTensor):
        _gather_strided(tensor, descriptor, start, buffer)
        return
    view = view_bytes(buffer)
    if isinstance(descriptor, RangedFile):
        first = tensor.offset + start
        for done in range(0, len(view), RANGE_BYTES):
            piece = view[done : done + RANGE_BYTES]
            data = descriptor.read(first + done, first + done + len(piece))
            if len(data) < len(piece):
                raise ValueError(f"{tensor} ends early: the object was cut while it was being read")
            piece[:] = data
        return
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], tensor.offset + start + done)
        except OSError as error:
            raise ValueError(f"cannot read {tensor}: {error.strerror}") from None
        if count == 0:
            raise ValueError(f"{tensor} ends early: the file was truncated while it was being read")
        done += count


def read_pieces(
    tensor: StoredTensor, descriptor: OpenFile, pieces: Sequence[tuple[int, NDArray[Any]]]
) -> None:
    """Fills several contiguous buffers, each from a byte of the tensor on. A store is asked for all
    of them at once.
    """
    if not isinstance(descriptor, RangedFile) or isinstance(tensor, (StridedTensor, WidenedTensor)):
        for start, buffer in pieces:
            read_into(tensor, descriptor, start, buffer)
        return
    ranges: list[tuple[int, int]] = []
    for start, buffer in pieces:
        first = tensor.offset + start
        ranges.append((first, first + buffer.nbytes))
    for (_, buffer), data in zip(pieces, descriptor.read_many(ranges), strict=True):
        view_bytes(buffer)[:] = data


def _read_widened(
    tensor: WidenedTensor, descriptor: OpenFile, start: int, buffer: NDArray[Any]
) -> None:
    """Fills a contiguous buffer with a widened tensor's bytes from byte `start` on."""
    wide_size = item_size(tensor.dtype)
    narrow_size = item_size(tensor.narrow.dtype)
    first, inside = divmod(start, wide_size)
    view = _flatten_to_bytes(buffer)
    count = -(-(inside + len(view)) // wide_size)
    narrow: Any = np.empty(count, f"u{narrow_size}")
    read_into(tensor.narrow, descriptor, first * narrow_size, narrow)
    if tensor.narrow.dtype == "BF16":  # the first half of an fp32 number
        values = (narrow.astype(np.uint32) << 16).view(np.float32)
    else:
        values = narrow.view(f"f{narrow_size}")
    wide = values.astype(f"f{wide_size}")
    view[:] = _flatten_to_bytes(wide)[inside : inside + len(view)]


def _gather_strided(
    tensor: StridedTensor, descriptor: OpenFile, start: int, buffer: NDArray[Any]
) -> None:
    """Fills a contiguous buffer with a strided tensor's bytes, in row-major order, from byte
    `start` on.
    """
    itemsize = item_size(tensor.dtype)
    first, inside = divmod(start, itemsize)
    view = _flatten_to_bytes(buffer)
    count = -(-(inside + len(view)) // itemsize)
    assert not isinstance(descriptor, RangedFile), "pickled files are copied from a store"
    try:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
            elements: NDArray[Any] = np.ndarray(
                tensor.view_shape,
                f"u{itemsize}",
                buffer=mapped,
                offset=tensor.offset,
                strides=tuple(stride * itemsize for stride in tensor.strides),
            )
            gathered = cast(Any, elements).flat[first : first + count]
            del elements  # The file cannot be closed while an array shows it.
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"cannot read {tensor}: {error}") from None
    view[:] = _flatten_to_bytes(gathered)[inside : inside + len(view)]


def read_bytes(tensor: StoredTensor, descriptor: OpenFile, start: int, count: int) -> bytes:
    """Returns `count` bytes of the tensor from byte `start` on."""
    content = np.empty(count, np.uint8)
    read_into(tensor, descriptor, start, content)
    return content.tobytes()


def write_all(tensor: StoredTensor, descriptor: OpenFile, start: int, data: memoryview) -> None:
    """Writes bytes of a tensor, from its byte `start` on.

    Raises:
        ValueError: The file cannot be written.
    """
    assert not isinstance(descriptor, RangedFile), "a store's objects are not written in place"
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(descriptor, data[done:], tensor.offset + start + done)
        except OSError as error:
            raise ValueError(f"cannot write {tensor}: {error.strerror}") from None


def hash_stored(tensor: StoredTensor, descriptor: OpenFile, chunk: int) -> str:
    """Returns the sha256 of a stored tensor, which is read in chunks of at most `chunk` bytes."""
    digest = hashlib.sha256()
    buffer = np.empty(min(chunk, max(tensor.nbytes, 1)), np.uint8)
    for start in range(0, tensor.nbytes, len(buffer)):
        block = buffer[: min(len(buffer), tensor.nbytes - start)]
        read_into(tensor, descriptor, start, block)
        digest.update(view_bytes(block))
    return digest.hexdigest()


def check_hash(tensor: StoredTensor, found: str, expected: str | None) -> None:
    """Compares the sha256 of a tensor with the recorded one, if there is one.

    Raises:
        ValueError: They differ.
    """
    if expected is not None and found != expected:
        raise ValueError(
            f"{tensor} is damaged: its sha256 is {found[:16]}…, "
            f"but the manifest has {expected[:16]}…"
        )


class HashingReader:
    """Reads a stored tensor in the order of its bytes and verifies its sha256.

    Bytes that the caller skips are still read, because the hash covers them.

    Args:
        tensor: The tensor to read.
        descriptor: Its file, open for reading.
        expected: The recorded sha256, or None to skip the check.
    """

    def __init__(self, tensor: StoredTensor, descriptor: OpenFile, expected: str | None) -> None:
        self.tensor = tensor
        self._descriptor = descriptor
        self._expected = expected
        self._digest = hashlib.sha256() if expected else None
        self._position = 0

    def read(self, start: int, buffer: NDArray[Any]) -> None:
        """Fills a contiguous buffer of any type with the bytes from byte `start` on."""
        if self._digest is not None:
            self._hash_until(start)
        read_into(self.tensor, self._descriptor, start, buffer)
        if self._digest is not None and buffer.nbytes:
            self._digest.update(view_bytes(buffer))
        self._position = start + buffer.nbytes

    def finish(self) -> None:
        """Reads and hashes what is left of the tensor.

        Raises:
            ValueError: The sha256 of the tensor's bytes differs from the recorded one.
        """
        if self._digest is not None:
            self._hash_until(self.tensor.nbytes)
            check_hash(self.tensor, self._digest.hexdigest(), self._expected)

    def _hash_until(self, stop: int) -> None:
        assert self._digest is not None
        assert stop >= self._position, f"{self.tensor} must be read in the order of its bytes"
        while self._position < stop:
            skipped = np.empty(min(stop - self._position, len(ZEROS)), np.uint8)
            read_into(self.tensor, self._descriptor, self._position, skipped)
            self._digest.update(view_bytes(skipped))
            self._position += skipped.nbytes


class TensorSink(Protocol):
    """Receives the bytes of a stored tensor in order.

    It may stand for several tensors with equal contents in different files.
    """

    tensors: Sequence[StoredTensor]

    def write(self, start: int, data: NDArray[Any]) -> None:
        """Receives a contiguous array of any type at byte `start`.

        Skipped bytes are padding, which is zero.
        """
        ...

    def finish(self) -> str:
        """Pads to the end of the tensor and returns the sha256 of its bytes."""
        ...


class HashingWriter:
    """A `TensorSink` that writes the same bytes to one or several files and hashes them once."""

    def __init__(
        self, tensors: Sequence[StoredTensor], files: Mapping[Path, OpenFile] | OpenFiles
    ) -> None:
        self.tensors = tensors
        self._targets = [(tensor, files[tensor.file]) for tensor in tensors]
        self._digest = hashlib.sha256()
        self._position = 0

    def write(self, start: int, data: NDArray[Any]) -> None:
        self._pad_until(start)
        if data.nbytes:
            self._append(view_bytes(data))

    def finish(self) -> str:
        self._pad_until(self.tensors[0].nbytes)
        return self._digest.hexdigest()

    def _pad_until(self, stop: int) -> None:
        first = self.tensors[0]
        assert stop >= self._position, f"{first} must be written in the order of its bytes"
        while self._position < stop:
            self._append(memoryview(ZEROS)[: stop - self._position])

    def _append(self, data: memoryview) -> None:
        for tensor, descriptor in self._targets:
            write_all(tensor, descriptor, self._position, data)
        self._digest.update(data)
        self._position += len(data)


class ComparingSink:
    """A `TensorSink` that compares the bytes with existing files instead of writing them.

    Padding is not compared.

    Attributes:
        differing: For each tensor that differs, the position of the first byte that does.
    """

    def __init__(self, tensors: Sequence[StoredTensor], files: OpenFiles) -> None:
        self.tensors = tensors
        self.differing: dict[str, int] = {}
        self._targets = [(tensor, files[tensor.file]) for tensor in tensors]

    def write(self, start: int, data: NDArray[Any]) -> None:
        expected = _flatten_to_bytes(data)
        for tensor, descriptor in self._targets:
            found = np.empty(data.nbytes, np.uint8)
            read_into(tensor, descriptor, start, found)
            if str(tensor) not in self.differing and not np.array_equal(found, expected):
                self.differing[str(tensor)] = start + int(np.argmax(found != expected))

    def finish(self) -> str:
        return ""
