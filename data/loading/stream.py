"""Loads batches from streams larger than memory, shuffled in windows and resumable at any batch.

Every worker of every rank reads the whole stream and keeps its share. Reading is cheap compared
with tokenizing, and each worker tokenizes only its share. In return, the order of samples and the
end of the stream are the same for all.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..labels import without_labels
from ..text.corpus import as_prefix, hash_document
from ..text.documents import OnBad, describe, fail_on_bad, name_source
from ..text.records import BadRecord, check_text, read_chunk
from ..text.sources import Source, plan_chunks
from .collate import CollateFunction, PadBatch
from .loader import Share, choose_worker_start, seed_generators

UNSHUFFLED_WINDOW = 256

RecordTransform = Callable[[Any, np.random.Generator], dict[str, Any]]


class RecordSource(Protocol):
    """A stream that can be read repeatedly, epoch by epoch, from any cursor that it yielded before.

    A cursor is a value that JSON can hold.
    """

    def read(self, epoch: int, cursor: Any) -> Iterator[tuple[Any, Any]]:
        """Yields (record, cursor after it) from `cursor` on; None is the beginning of the epoch."""
        ...


class DocumentRecords:
    """Reads the texts of a source (see `plan_chunks`).

    Args:
        source: Files and folders.
        seed: Shuffles the chunks in each epoch; None keeps their order.
        text_key: Key or column that holds the text.
        on_bad: Called with every bad record; raises, or returns to skip the record.
    """

    def __init__(
        self,
        source: Source,
        *,
        seed: int | None = 1234,
        text_key: str = "text",
        on_bad: OnBad = fail_on_bad,
    ) -> None:
        self.chunks = plan_chunks(source)
        self.seed = seed
        self.text_key = text_key
        self.on_bad = on_bad

    @property
    def identity(self) -> str:
        """A digest of the files' names, sizes and order.

        It does not depend on their folders and times, so that they can be moved.
        """
        digest = hashlib.blake2b(digest_size=16)
        paths = dict.fromkeys(path for chunk in self.chunks for path in chunk.paths)
        for path in paths:
            size = path.stat().st_size if path.is_file() else ""
            digest.update(f"{path.name} {size}/".encode("utf-8", "surrogateescape"))
        for chunk in self.chunks:
            digest.update(f"{chunk.kind} {chunk.start} {chunk.stop}/".encode())
        return digest.hexdigest()

    def read(self, epoch: int, cursor: Any) -> Iterator[tuple[str, list[int]]]:
        """Yields (text, cursor after it).

        A cursor is [place of the chunk in the order, record in the chunk].
        """
        first_place, first_record = cursor or (0, 0)
        order = np.arange(len(self.chunks))
        if self.seed is not None:
            order = np.random.default_rng([self.seed, 5, epoch]).permutation(len(self.chunks))
        for place in range(first_place, len(self.chunks)):
            chunk = self.chunks[order[place]]
            text = read_chunk(chunk, self.text_key)
            for bad in text.bad:
                where = f" (counted from {chunk.start} on)" if chunk.start else ""
                self.on_bad(replace(bad, reason=bad.reason + where))
            for record in range(first_record, len(text.documents)):
                yield text.documents[record], [place, record + 1]
            first_record = 0


class IterableRecords:
    """Reads an iterable made by `make(epoch)`, such as a streaming Hugging Face dataset.

    `make(epoch)` must give the same records in the same order every time, because every worker
    reads the whole iterable: its randomness must depend on the epoch alone, not on global
    generators. The iterable cannot see that it runs in a worker. Resuming calls its `skip(n)` if it
    has one; otherwise the consumed records are read and dropped.
    """

    def __init__(self, make: Callable[[int], Iterable[Any]]) -> None:
        self.make = make

    @classmethod
    def from_iterable(cls, dataset: Any) -> IterableRecords:
        """Returns the records of an iterable that starts again, which is told the epoch if it has a
        `set_epoch`.
        """
        return cls(lambda epoch: _set_epoch(dataset, epoch))

    def read(self, epoch: int, cursor: Any) -> Iterator[tuple[Any, int]]:
        """Yields (record, cursor after it); a cursor is the number of records before it."""
        seen = cursor or 0
        with _hide_worker():
            rest = self._skip(self.make(epoch), seen)
        for number in count(seen + 1):
            with _hide_worker():
                found = list(islice(rest, 1))
            if not found:
                return
            yield found[0], number

    @staticmethod
    def _skip(records: Iterable[Any], seen: int) -> Iterator[Any]:
        # The dataset that Hugging Face's `skip` returns is in epoch 0, and shuffles no shards for
        # another epoch, so a dataset with epochs is read from its beginning.
        if seen and hasattr(records, "skip") and not hasattr(records, "set_epoch"):
            return iter(records.skip(seen))  # type: ignore[attr-defined]
        return islice(records, seen, None)


class TextStream:
    """The documents of a source that need not fit on a disk, divided into training documents and
    held-out ones.

    As in `prepare_corpus`, a hash of its text and the seed decides on which side a document is,
    wherever it comes in the stream. Records without usable text are skipped; the first one is
    reported by a warning.

    Args:
        source: What `plan_chunks` reads; the name of a dataset on the Hugging Face hub, as
            `owner/name` or `owner/name/configuration`, of which the split `train` is streamed; or
            an iterable that starts again and gives texts or records, such as a
            `datasets.IterableDataset`.
        text_key: Key or column that holds the text.
        held_out_fraction: Share of the documents that is held out, from 0 up to, not including, 1.
        seed: Decides the sides, and the order of the chunks or files in each epoch.
    """

    def __init__(
        self,
        source: Any = None,
        *,
        text_key: str = "text",
        held_out_fraction: float = 0.05,
        seed: int = 1234,
    ) -> None:
        if not 0 <= held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction is {held_out_fraction}; it must be at least 0 and less than 1"
            )
        self.text_key = text_key
        self.seed = seed
        self.held_out_fraction = held_out_fraction
        self.name = name_source(source) if is_source(source) else f"the {type(source).__name__}"
        self._warned = False
        self.records = self._open(source)

    @property
    def identity(self) -> str:
        """What the meaning of a cursor depends on, as far as it is known."""
        source = self.name
        if isinstance(self.records, DocumentRecords):
            source = self.records.identity
        return f"{source} {self.text_key} {self.seed} {self.held_out_fraction}"

    def read(self, epoch: int, cursor: Any) -> Iterator[tuple[str, Any]]:
        """Yields (training document, cursor after it); see `RecordSource`."""
        for text, is_held_out, after in self._iter_documents(epoch, cursor):
            if not is_held_out:
                yield text, after

    def beginning(self, characters: int, *, held_out: bool = False) -> list[str]:
        """Returns the first training documents, or held-out ones, that together have `characters`,
        or all there are.

        Raises:
            ValueError: There are none.
        """
        found: list[str] = []
        size = 0
        for text, is_held_out, _ in self._iter_documents(0, None):
            if is_held_out == held_out:
                found.append(text)
                size += len(text)
                if size >= characters:
                    break
        if not found:
            side = "held out" if held_out else "left to train on"
            raise ValueError(
                f"no document of {self.name} is {side} with "
                f"held_out_fraction={self.held_out_fraction}; use another fraction, or more text"
            )
        return found

    def _iter_documents(self, epoch: int, cursor: Any) -> Iterator[tuple[str, bool, Any]]:
        """Yields (text, whether it is held out, cursor after it)."""
        limit = int(self.held_out_fraction * 2**64)
        for record, after in self.records.read(epoch, cursor):
            text = record
            if not isinstance(self.records, DocumentRecords):
                text = self._extract_text(record, after)
            if text and not text.isspace():
                key = int.from_bytes(hash_document(text, self.seed), "big")
                yield text, key < limit, after

    def _open(self, source: Any) -> RecordSource:
        if not is_source(source):
            if isinstance(source, (Iterator, Mapping)) or not hasattr(source, "__iter__"):
                raise ValueError(
                    f"a stream cannot read the type {type(source).__name__}: give paths, a name on "
                    "the Hugging Face hub, or an iterable of texts or records that starts again; "
                    "of several splits, give one"
                )
            return IterableRecords.from_iterable(source)
        if as_prefix(source) is not None:
            raise ValueError(
                f"{source} is a .bin/.idx pair, which is tokenized already; "
                "train on it without a stream"
            )
        if isinstance(source, str) and not Path(source).exists() and may_be_on_hub(source):
            return IterableRecords.from_iterable(open_hub_dataset(source, self.seed))
        return DocumentRecords(source, seed=self.seed, text_key=self.text_key, on_bad=self._warn)

    def _extract_text(self, record: Any, number: int) -> str | None:
        """Returns the text of a record; None, after a warning, if it has no usable text."""
        if isinstance(record, Mapping):
            if self.text_key not in record:
                names = ", ".join(map(repr, record))
                raise ValueError(
                    f"{self.name} has no column {self.text_key!r}; its columns are {names}"
                )
            record = record[self.text_key]
        try:
            return check_text(record, f"the value of {self.text_key!r}")
        except ValueError as error:
            self._warn(BadRecord(Path(self.name), number, str(error)))
            return None

    def _warn(self, record: BadRecord) -> None:
        if not self._warned:
            warnings.warn(
                f"skipped {describe(record)}; further bad records are skipped without notice",
                stacklevel=2,
            )
        self._warned = True


def is_source(value: Any) -> bool:
    """Returns whether a value names files, folders or a dataset, rather than being one."""
    if value is None:
        return True
    names = value if isinstance(value, (list, tuple)) else [value]
    return bool(names) and all(isinstance(name, (str, Path)) for name in names)


def may_be_on_hub(name: str) -> bool:
    """Returns whether a name that is no local file can be that of a dataset, rather than a
    misspelled path.
    """
    is_name = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*){1,2}", name) is not None
    return is_name and not Path(name).parent.is_dir()


def open_hub_dataset(name: str, seed: int) -> Any:
    """Opens the stream of a dataset on the Hugging Face hub, whose files come in another order in
    each epoch.

    Raises:
        ValueError: There is no such file, folder or dataset, or it cannot be reached.
    """
    import datasets

    parts = name.split("/")
    path = "/".join(parts[:2])
    configuration = "/".join(parts[2:]) or None
    try:
        dataset = datasets.load_dataset(path, configuration, split="train", streaming=True)
        return dataset.shuffle(seed, buffer_size=1)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is no file or folder, and cannot be streamed from the Hugging Face hub "
            f"({type(error).__name__}: {error}); give a path, or a dataset as owner/name or "
            "owner/name/configuration"
        ) from None


def _set_epoch(dataset: Any, epoch: int) -> Iterable[Any]:
    """Tells an iterable the epoch if it has a `set_epoch`, and returns it."""
    number = getattr(dataset, "_epoch", None)
    # Hugging Face datasets shares the number between workers, which may be in different epochs.
    if isinstance(number, torch.Tensor) and number.is_shared():
        dataset._epoch = number.clone()
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    return dataset


@contextmanager
def _hide_worker() -> Iterator[None]:
    """Hides from an iterable that it is read in a worker.

    Hugging Face streams, and torch's as its manual writes them, give each worker a different part.
    Here every worker must read the whole stream and takes its share afterwards.
    """
    hidden = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = hidden


@dataclass(frozen=True)
class StreamEnd:
    """Stands in the place of a batch after the last one.

    Attributes:
        total: The number of samples of all epochs.
    """

    total: int


class StreamLoader(ABC):
    """The base of what loads batches of streams for one rank, and resumes at a bookmark.

    Args:
        share: Micro-batch size, rank and number of data-parallel ranks.
        num_workers: Processes that read ahead. Each reads the whole stream, and makes every
            `num_workers`-th batch.
        bookmark: Where the first sample is read from.

    Attributes:
        total: The number of samples, known when a stream has been read to its end; None before.
    """

    def __init__(self, share: Share, num_workers: int, bookmark: dict[str, Any]) -> None:
        self.share = share
        self.num_workers = num_workers
        self.total: int | None = None
        self._consumed = 0
        self._bookmark = bookmark

    def __iter__(self) -> Iterator[Any]:
        # Without a generator of its own, the loader would advance the one of the caller's dropout.
        loader = DataLoader(
            _WorkerBatches(self),
            batch_size=None,
            num_workers=self.num_workers,
            multiprocessing_context=choose_worker_start(self.num_workers),
            generator=torch.Generator(),
        )
        for batch, consumed, bookmark in loader:
            if isinstance(batch, StreamEnd):
                self.total = batch.total
                continue
            self._consumed = consumed
            self._bookmark = bookmark
            yield batch

    @abstractmethod
    def iter_worker(self, worker: int, workers: int) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        """Yields the batches of one of several workers, from the current state on, in order.

        Yields:
            (batch, samples that all ranks have consumed after it, bookmark to resume from after
                it). The first worker may end with a `StreamEnd` as a batch.
        """

    @abstractmethod
    def peek(self, count: int) -> list[Any]:
        """Returns the first records of the first epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of samples that all ranks have consumed, and the bookmark."""
        return {"consumed_samples": self._consumed, "bookmark": dict(self._bookmark)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state. ValueError for the state of another kind of loader."""
        if "bookmark" not in state:
            raise ValueError(
                "this state is a position in numbered samples; a stream cannot resume from it"
            )
        if state["bookmark"].keys() != self._bookmark.keys():
            raise ValueError(
                f"this state is a position in another kind of stream than a {type(self).__name__}"
            )
        self._consumed = state["consumed_samples"]
        self._bookmark = dict(state["bookmark"])


class _WorkerBatches(IterableDataset):
    """Gives the process that iterates over it, which may be a worker, its batches of a stream."""

    def __init__(self, stream: StreamLoader) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        info = get_worker_info()
        if info is None:
            yield from self.stream.iter_worker(0, 1)
        else:
            yield from self.stream.iter_worker(info.id, info.num_workers)


class ResumableStream(StreamLoader):
    """Loads batches of a stream for one rank.

    A global batch does not depend on the number of workers or ranks.

    Windows of `shuffle_buffer` records are permuted, each with its own seed. The position of a
    sample in the global batch decides its rank, exactly as in `ResumableLoader`. `state_dict()`
    holds the number of samples yielded and a bookmark of the window of the next one. Resuming, also
    with other numbers of ranks and workers, reads that window again; no sample is repeated or lost.
    In a worker, the global random generators that a transform or collate function may use are
    seeded from `seed` and the batch's first sample. Randomness in reading the records must depend
    on the epoch alone.

    Args:
        records: What the samples are made of.
        transform: Turns (record, generator) into a sample; the generator depends on (seed, sample
            number) alone.
        share: Micro-batch size, rank and number of data-parallel ranks.
        shuffle_buffer: Records that are permuted together; 0 keeps the order.
        epochs: Passes over the stream; None is endless.
        last: What to do with an incomplete last global batch: "drop" it, or "pad" it on every rank
            with copies whose labels are −100. Either way all ranks see the same number of batches.
        collate: Turns samples into a batch; default `PadBatch()`.
    """

    def __init__(
        self,
        records: RecordSource,
        transform: RecordTransform,
        share: Share,
        *,
        shuffle_buffer: int = 0,
        seed: int = 1234,
        epochs: int | None = 1,
        last: Literal["drop", "pad"] = "drop",
        num_workers: int = 0,
        collate: CollateFunction | None = None,
    ) -> None:
        if shuffle_buffer < 0:
            raise ValueError(f"shuffle_buffer is {shuffle_buffer}; it cannot be negative")
        super().__init__(share, num_workers, {"epoch": 0, "cursor": None, "number": 0})
        self.records = records
        self.transform = transform
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.epochs = epochs
        self.last = last
        self.collate = collate or PadBatch()

    def peek(self, count: int) -> list[Any]:
        return [record for record, _ in islice(self.records.read(0, None), count)]

    def iter_worker(self, worker: int, workers: int) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        size = self.share.global_batch
        start = self._consumed
        first = start + self.share.rank * self.share.micro_batch_size  # this rank's first sample
        own: list[tuple[int, Any]] = []  # this rank's (number, record) of the current global batch
        number = start
        record = None
        bookmark = self._bookmark
        for number, record, bookmark in self._iter_records():
            batch, place = divmod(number - start, size)
            if batch % workers != worker:
                continue
            if place // self.share.micro_batch_size == self.share.rank:
                own.append((number, record))
            if place == size - 1:
                yield self._build_batch(first + batch * size, own), number + 1, bookmark
                own = []
        # A last global batch that is not complete is left out, or completed with copies.
        read = 0 if record is None else number + 1 - start
        complete, rest = divmod(read, size)
        if rest and self.last == "pad" and complete % workers == worker:
            padded = self._build_batch(first + complete * size, own, copied=(number, record))
            yield padded, number + 1, bookmark
        if self.last == "drop" and worker == 0:
            yield StreamEnd(start + read), start + read, bookmark

    def _iter_records(self) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        """Yields (number, record, bookmark of its window) of every sample not yet consumed."""
        window_size = self.shuffle_buffer or UNSHUFFLED_WINDOW
        number = self._bookmark["number"]
        cursor = self._bookmark["cursor"]
        for epoch in count(self._bookmark["epoch"]):
            if self.epochs is not None and epoch >= self.epochs:
                return
            is_empty = cursor is None
            reader = self.records.read(epoch, cursor)
            while window := list(islice(reader, window_size)):
                bookmark = {"epoch": epoch, "cursor": cursor, "number": number}
                order = np.arange(len(window))
                if self.shuffle_buffer:
                    generator = np.random.default_rng([self.seed, 6, number])
                    order = generator.permutation(len(window))
                for place, taken in enumerate(order):
                    if number + place >= self._consumed:
                        record, _ = window[taken]
                        yield number + place, record, bookmark
                number += len(window)
                cursor = window[-1][1]
                is_empty = False
            if is_empty:
                raise ValueError("the stream holds no records")
            cursor = None

    def _build_batch(
        self, first: int, own: list[tuple[int, Any]], copied: tuple[int, Any] | None = None
    ) -> Any:
        """Returns this rank's batch, which begins with sample `first`.

        Args:
            first: Number of the batch's first sample.
            own: (number, record) of each sample.
            copied: (number, record) of the sample whose copies, without labels, complete the batch.
        """
        if get_worker_info() is not None:
            seed_generators(self.seed, first)
        samples = [self._build_sample(number, record) for number, record in own]
        if copied is not None:
            missing = self.share.micro_batch_size - len(samples)
            samples += [without_labels(self._build_sample(*copied))] * missing
        return self.collate(samples)

    def _build_sample(self, number: int, record: Any) -> dict[str, Any]:
        return self.transform(record, np.random.default_rng([self.seed, 7, number]))
