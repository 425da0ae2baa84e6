"""Writes `.bin`/`.idx` pairs: byte-identical to Megatron-LM's, atomic, resumable, in constant
memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from ...files.safe_paths import is_named
from ...files.working_copies import find_work, push_files
from .dataset import IndexedDataset
from .format import HEADER, MAGIC, VERSION, bin_path, dtype_code, idx_path
from .meta import CorpusMeta, meta_path

COPY_BYTES = 1 << 24
# The files of sizes and documents begin with the name of the run that writes them, in hexadecimal.
RUN_BYTES = 32


@dataclass(frozen=True)
class WriterState:
    """Counts the valid part of an unfinished dataset.

    `IndexedDatasetWriter(..., resume=state)` continues from it.

    Attributes:
        run: The name of the run, which its partial files also have. It is drawn when a dataset is
            begun, so counts are never applied to the tokens of another run.
    """

    run: str
    tokens: int
    sequences: int
    documents: int


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
        self.prefix = find_work(prefix)
        prefix = self.prefix
        self.dtype = np.dtype(dtype)
        self._code = dtype_code(self.dtype)
        self._limits = np.iinfo(self.dtype) if self.dtype.kind in "iu" else None
        self.keep_partial = keep_partial
        self._meta = meta
        self._index_partial = Path(f"{prefix}.idx.partial")
        self._names = {
            part: Path(f"{prefix}.{part}.partial") for part in ("bin", "sizes", "documents")
        }
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        state = resume or WriterState(secrets.token_hex(RUN_BYTES // 2), 0, 0, 0)
        self._run = state.run
        self._files: dict[str, BinaryIO] = {}
        try:
            self._open("bin")
            self._lock()
            # Other writers do not touch these while the lock is held.
            self._open("sizes")
            self._open("documents")
            if resume is None:
                self._name_run()
            self._cut("sizes", RUN_BYTES + state.sequences * 4)
            self._cut("documents", RUN_BYTES + state.documents * 8)
            self._cut("bin", state.tokens * self.dtype.itemsize)
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
        return WriterState(self._run, self._tokens, self._sequences, self._documents)

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
        # The files are removed while the lock is held: afterwards they may be another writer's.
        if not self.keep_partial:
            for name in (self._index_partial, *reversed(self._names.values())):
                name.unlink(missing_ok=True)
        for file in self._files.values():
            # A full disk fails here again; the error that ended the `with` has reported it.
            with suppress(OSError):
                file.close()

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
        # While these files have their names, the lock keeps other writers from them.
        self._names["sizes"].unlink()
        self._names["documents"].unlink()
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
        push_files(self.prefix, (".bin", ".meta.json", ".idx"))

    def _open(self, part: str) -> None:
        descriptor = os.open(self._names[part], os.O_RDWR | os.O_CREAT, 0o666)
        self._files[part] = os.fdopen(descriptor, "r+b", buffering=1 << 20)

    def _lock(self) -> None:
        """Locks the file of tokens.

        Raises:
            ValueError: Another process writes the prefix, or has finished it since the file was
                opened: then the descriptor is of the finished dataset's tokens.
        """
        descriptor = self._files["bin"].fileno()
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
        if not is_named(descriptor, self._names["bin"]):
            raise ValueError(
                f"another process was writing {self.prefix} and has ended just now; "
                f"look at its result, then run this again if it is still needed"
            )

    def _name_run(self) -> None:
        """Writes the name of a new run into its files.

        It is on the disk before the first token is replaced, so that no run that was interrupted
        before takes the tokens for its own.
        """
        for part in ("sizes", "documents"):
            file = self._files[part]
            file.truncate(0)
            file.write(self._run.encode())
            file.flush()
            os.fsync(file.fileno())

    def _cut(self, part: str, valid_bytes: int) -> None:
        """Cuts off what was written to a file after the last commit, and goes to its end.

        Raises:
            ValueError: The file is not of the run, or is too short.
        """
        file = self._files[part]
        path = self._names[part]
        file.seek(0)
        if part != "bin" and file.read(RUN_BYTES) != self._run.encode():
            raise ValueError(
                f"{path} is not of the run that is to be resumed: another one has written it "
                "since; start again without resuming"
            )
        if os.fstat(file.fileno()).st_size < valid_bytes:
            raise ValueError(
                f"{path} is shorter than the {valid_bytes} bytes to resume from; "
                "start again without resuming"
            )
        file.truncate(valid_bytes)
        file.seek(valid_bytes)

    def _iter_written(self, part: str, dtype: str):
        """Yields the values written so far to a side file, block by block."""
        file = self._files[part]
        file.seek(RUN_BYTES)
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
        file.seek(RUN_BYTES + 8 * (self._documents - 1))
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
