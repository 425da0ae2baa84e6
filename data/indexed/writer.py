"""Writes `.bin`/`.idx` pairs: byte-identical to Megatron-LM's, atomic, resumable, in constant
memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from .dataset import IndexedDataset
from .format import HEADER, MAGIC, VERSION, bin_path, dtype_code, idx_path
from .meta import CorpusMeta, meta_path

COPY_BYTES = 1 << 24


@dataclass(frozen=True)
class WriterState:
    """Counts the valid part of an unfinished dataset.

    `IndexedDatasetWriter(..., resume=state)` continues from it.
    """

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class IndexedDatasetWriter:
    """Context manager that collects sequences in `PREFIX.*.partial` files and renames them when it
    exits.

    An exception inside the `with` leaves no dataset: the partial files are deleted, unless
    `keep_partial` is set (for a run that may be resumed). Memory does not grow with the number of
    sequences. Only one process may write a prefix at a time.

    Args:
        prefix: Output path without `.bin`/`.idx`.
        dtype: Token dtype; see `dtype_for_vocabulary`. Tokens that it cannot hold raise ValueError
            and are never wrapped around.
        resume: Continue the partial files from this state; anything after it is truncated.
        keep_partial: Whether to keep the partial files after an exception.
        meta: What to record beside the pair.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype | type = np.int32,
        *,
        resume: WriterState | None = None,
        keep_partial: bool = False,
        meta: CorpusMeta | None = None,
    ) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self._code = dtype_code(self.dtype)
        self._limits = np.iinfo(self.dtype) if self.dtype.kind in "iu" else None
        self._keep_partial = keep_partial
        self._meta = meta
        self._index_partial = Path(f"{prefix}.idx.partial")
        self._names = {
            part: Path(f"{prefix}.{part}.partial") for part in ("bin", "sizes", "documents")
        }
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        state = resume or WriterState()
        self._files: dict[str, BinaryIO] = {}
        try:
            self._open("bin", state.tokens * self.dtype.itemsize)
            self._open("sizes", state.sequences * 4)
            self._open("documents", state.documents * 8)
        except BaseException:
            for file in self._files.values():
                file.close()
            raise
        self._tokens = state.tokens
        self._sequences = state.sequences
        self._documents = state.documents
        self._last_mark = self._read_last_mark()

    def add_sequence(self, tokens: np.ndarray | list[int]) -> None:
        """Appends one sequence [n] to the open document."""
        self.add_sequences(np.asarray(tokens), np.array([len(tokens)]))

    def add_sequences(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Appends several sequences at once: `tokens` [sum(lengths)] is their concatenation."""
        tokens = np.asarray(tokens)
        lengths = np.asarray(lengths)
        if tokens.ndim != 1 or lengths.sum() != len(tokens):
            raise ValueError(
                f"tokens of shape {tokens.shape} do not match the sum of the lengths, "
                f"{lengths.sum()}"
            )
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise ValueError(
                f"a sequence of {lengths.max()} tokens is too long; "
                "the format stores lengths as int32"
            )
        self._check_range(tokens)
        self._files["bin"].write(tokens.astype(self.dtype, copy=False).tobytes())
        self._files["sizes"].write(lengths.astype("<i4").tobytes())
        self._tokens += len(tokens)
        self._sequences += len(lengths)

    def end_document(self) -> None:
        """Closes the open document, which consists of the sequences added since the last document
        ended.
        """
        self._mark_documents(np.array([self._sequences]))

    def end_documents(self, sequences: np.ndarray) -> None:
        """Closes several documents at once.

        `sequences` [documents] is the number of sequences of each.
        """
        ends = self._last_mark + np.cumsum(sequences)
        if len(ends) and ends[-1] != self._sequences:
            raise ValueError(
                f"the documents end at sequence {ends[-1]}, but {self._sequences} were added"
            )
        self._mark_documents(ends)

    def add_documents(
        self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray | None = None
    ) -> None:
        """Appends documents; `tokens` [sum(lengths)] is the concatenation of their sequences.

        `sequences` [documents] is the number of sequences of each; None: one.
        """
        if self._last_mark != self._sequences:
            raise ValueError("add_documents was called inside a document; call end_document first")
        self.add_sequences(tokens, lengths)
        self.end_documents(np.ones(len(lengths), np.int64) if sequences is None else sequences)

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Appends all documents of another dataset of the same dtype."""
        if dataset.dtype != self.dtype:
            raise ValueError(
                f"{dataset.prefix} holds {dataset.dtype} tokens and cannot be appended to "
                f"{self.dtype}"
            )
        first = self._sequences
        step = COPY_BYTES // 8
        for start in range(0, dataset.num_tokens, step):
            self._files["bin"].write(dataset.tokens[start : start + step].tobytes())
        for start in range(0, len(dataset), step):
            self._files["sizes"].write(dataset.sizes[start : start + step].tobytes())
        self._tokens += dataset.num_tokens
        self._sequences += len(dataset)
        for start in range(1, dataset.num_documents + 1, step):
            self._mark_documents(dataset.document_indices[start : start + step] + first)

    def commit(self) -> WriterState:
        """Flushes everything to disk and returns the state from which a later writer can resume."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return WriterState(self._tokens, self._sequences, self._documents)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            self._finish()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        for file in self._files.values():
            # A full disk fails here again; the error that ended the `with` has reported it.
            with suppress(OSError):
                file.close()
        if not self._keep_partial:
            for name in (*self._names.values(), self._index_partial):
                name.unlink(missing_ok=True)

    def _finish(self) -> None:
        if self._last_mark != self._sequences:
            self.end_document()
        self.commit()
        with self._index_partial.open("wb") as file:
            file.write(
                HEADER.pack(MAGIC, VERSION, self._code, self._sequences, self._documents + 1)
            )
            position = 0
            for sizes in self._iter_written("sizes", "<i4"):
                file.write(sizes.tobytes())
            for sizes in self._iter_written("sizes", "<i4"):
                ends = position + np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
                file.write(np.concatenate(([position], ends[:-1])).astype("<i8").tobytes())
                position = int(ends[-1])
            file.write(np.zeros(1, "<i8").tobytes())
            for marks in self._iter_written("documents", "<i8"):
                file.write(marks.tobytes())
            file.flush()
            os.fsync(file.fileno())
        # The old index is removed first and the new one comes last, so that a reader never pairs an
        # index with the wrong tokens.
        idx_path(self.prefix).unlink(missing_ok=True)
        meta_path(self.prefix).unlink(missing_ok=True)
        if self._meta is not None:
            self._meta.write(self.prefix)
        self._names["bin"].replace(bin_path(self.prefix))
        self._index_partial.replace(idx_path(self.prefix))
        for file in self._files.values():
            file.close()
        self._names["sizes"].unlink()
        self._names["documents"].unlink()

    def _open(self, part: str, valid_bytes: int) -> None:
        path = self._names[part]
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        file = os.fdopen(descriptor, "r+b", buffering=1 << 20)
        self._files[part] = file
        if part == "bin":
            self._lock(descriptor)
        if os.fstat(descriptor).st_size < valid_bytes:
            raise ValueError(
                f"{path} is shorter than the {valid_bytes} bytes to resume from; "
                "start again without resuming"
            )
        file.truncate(valid_bytes)
        file.seek(valid_bytes)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing {self.prefix}; wait for it or choose another output"
            ) from None
        except OSError as error:
            # Some file systems have no locks.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise

    def _iter_written(self, part: str, dtype: str):
        """Yields the values written so far to a side file, block by block."""
        file = self._files[part]
        file.seek(0)
        while block := file.read(COPY_BYTES):
            yield np.frombuffer(block, dtype)

    def _mark_documents(self, ends: np.ndarray) -> None:
        if len(ends):
            self._files["documents"].write(ends.astype("<i8").tobytes())
            self._documents += len(ends)
            self._last_mark = int(ends[-1])

    def _read_last_mark(self) -> int:
        if self._documents == 0:
            return 0
        file = self._files["documents"]
        file.seek(8 * (self._documents - 1))
        return int(np.frombuffer(file.read(8), "<i8")[0])

    def _check_range(self, tokens: np.ndarray) -> None:
        if len(tokens) == 0 or self._limits is None or tokens.dtype == self.dtype:
            return
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens of dtype {tokens.dtype} cannot be stored as {self.dtype}")
        low = int(tokens.min())
        high = int(tokens.max())
        if low < self._limits.min or high > self._limits.max:
            raise ValueError(
                f"token ids {low} to {high} do not fit {self.dtype} ({self._limits.min} to "
                f"{self._limits.max}); use int32 for vocabularies of 65500 entries and more"
            )
