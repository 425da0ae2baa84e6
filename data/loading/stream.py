"""Loads batches from streams larger than memory, shuffled in windows and resumable at any batch.

Every worker of every rank reads the whole stream and keeps its share. Reading is cheap compared with tokenizing, and
each worker tokenizes only its share. In return, the order of samples and the end of the stream are the same for all.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..objectives.labels import without_labels
from ..text.corpus import as_prefix, document_key
from ..text.documents import OnBad, describe, fail_on_bad, source_name
from ..text.records import BadRecord, check_text, read_chunk
from ..text.sources import Source, plan_chunks
from .collate import CollateFunction, PadBatch
from .loader import Share, seed_generators

UNSHUFFLED_WINDOW = 256

Transform = Callable[[Any, np.random.Generator], dict[str, Any]]


class Records(Protocol):
    """A stream that can be read repeatedly, epoch by epoch, from any cursor it yielded before (a JSON-able value)."""

    def read(self, epoch: int, cursor: Any) -> Iterator[tuple[Any, Any]]:
        """Yields (record, cursor after it) from `cursor` on; None is the beginning of the epoch."""
        ...


class DocumentRecords:
    """Reads the texts of a source (see `plan_chunks`); chunks are shuffled in each epoch unless `seed` is None."""

    def __init__(
        self,
        source: Source,
        *,
        seed: int | None = 1234,
        text_key: str = "text",
        on_bad: OnBad = fail_on_bad,
    ) -> None:
        self.chunks = plan_chunks(source)
        self.seed, self.text_key, self.on_bad = seed, text_key, on_bad

    @property
    def identity(self) -> str:
        """A digest of the files' names, sizes and order; not of their folders and times, so that they can be moved."""
        digest = hashlib.blake2b(digest_size=16)
        for path in dict.fromkeys(path for chunk in self.chunks for path in chunk.paths):
            size = path.stat().st_size if path.is_file() else ""
            digest.update(f"{path.name} {size}/".encode("utf-8", "surrogateescape"))
        for chunk in self.chunks:
            digest.update(f"{chunk.kind} {chunk.start} {chunk.stop}/".encode())
        return digest.hexdigest()

    def read(self, epoch: int, cursor: Any) -> Iterator[tuple[str, list[int]]]:
        chunk, record = cursor or (0, 0)
        order = np.arange(len(self.chunks))
        if self.seed is not None:
            order = np.random.default_rng([self.seed, 5, epoch]).permutation(len(self.chunks))
        for place in range(chunk, len(self.chunks)):
            part = self.chunks[order[place]]
            text = read_chunk(part, self.text_key)
            for bad in text.bad:
                where = f" (counted from {part.start} on)" if part.start else ""
                self.on_bad(replace(bad, reason=bad.reason + where))
            for number in range(record, len(text.documents)):
                yield text.documents[number], [place, number + 1]
            record = 0


class IterableRecords:
    """Reads an iterable made by `make(epoch)`, such as a streaming Hugging Face dataset.

    `make(epoch)` must give the same records in the same order every time, because every worker reads the whole
    iterable: its randomness must depend on the epoch alone, not on global generators. The iterable cannot see
    that it runs in a worker. Resuming calls its `skip(n)` if it has one; otherwise the consumed records are read
    and dropped.
    """

    def __init__(self, make: Callable[[int], Iterable[Any]]) -> None:
        self.make = make

    @classmethod
    def from_iterable(cls, dataset: Any) -> IterableRecords:
        """Returns the records of an iterable that starts again, which is told the epoch if it has a `set_epoch`."""
        return cls(lambda epoch: _epoch_of(dataset, epoch))

    def read(self, epoch: int, cursor: Any) -> Iterator[tuple[Any, int]]:
        seen = cursor or 0
        with _without_worker():
            rest = self._behind(seen, self.make(epoch))
        for number in count(seen + 1):
            with _without_worker():
                found = list(islice(rest, 1))
            if not found:
                return
            yield found[0], number

    @staticmethod
    def _behind(seen: int, records: Iterable[Any]) -> Iterator[Any]:
        # The dataset that Hugging Face's `skip` returns is in epoch 0, and does not shuffle shards for another epoch.
        if seen and hasattr(records, "skip") and not hasattr(records, "set_epoch"):
            return iter(records.skip(seen))  # type: ignore[attr-defined]
        return islice(records, seen, None)


class TextStream:
    """The documents of a source that need not fit on a disk, divided into training documents and held-out ones.

    As in `prepare_corpus`, a hash of its text and the seed decides on which side a document is, wherever it comes in
    the stream. Records without usable text are skipped; the first one is reported by a warning.

    Args:
        source: what `plan_chunks` reads; the name of a dataset on the Hugging Face hub, as `owner/name` or
            `owner/name/configuration`, of which the split `train` is streamed; or an iterable that starts again and
            gives texts or records, such as a `datasets.IterableDataset`.
        text_key: key or column that holds the text.
        held_out_fraction: share of the documents that is held out, from 0 up to, not including, 1.
        seed: decides the sides, and the order of the chunks or files in each epoch.
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
        self.text_key, self.seed = text_key, seed
        self.held_out_fraction = held_out_fraction
        self.name = source_name(source) if is_source(source) else f"the {type(source).__name__}"
        self._warned = False
        self.records = self._open(source)

    @property
    def identity(self) -> str:
        """What the meaning of a cursor depends on, as far as it is known."""
        source = self.records.identity if isinstance(self.records, DocumentRecords) else self.name
        return f"{source} {self.text_key} {self.seed} {self.held_out_fraction}"

    def read(self, epoch: int, cursor: Any) -> Iterator[tuple[str, Any]]:
        """Yields (training document, cursor after it); see `Records`."""
        for text, is_held_out, after in self._documents(epoch, cursor):
            if not is_held_out:
                yield text, after

    def beginning(self, characters: int, *, held_out: bool = False) -> list[str]:
        """Returns the first training documents, or held-out ones, that together have `characters` or are all there are.

        Raises:
            ValueError: there are none.
        """
        found: list[str] = []
        size = 0
        for text, is_held_out, _ in self._documents(0, None):
            if is_held_out == held_out:
                found.append(text)
                size += len(text)
                if size >= characters:
                    break
        if not found:
            side = "held out" if held_out else "left to train on"
            raise ValueError(
                f"no document of {self.name} is {side} with held_out_fraction={self.held_out_fraction}; use another "
                "fraction, or more text"
            )
        return found

    def _documents(self, epoch: int, cursor: Any) -> Iterator[tuple[str, bool, Any]]:
        limit = int(self.held_out_fraction * 2**64)
        for record, after in self.records.read(epoch, cursor):
            text = (
                record if isinstance(self.records, DocumentRecords) else self._text(record, after)
            )
            if text and not text.isspace():
                yield text, int.from_bytes(document_key(text, self.seed), "big") < limit, after

    def _open(self, source: Any) -> Records:
        if not is_source(source):
            if isinstance(source, (Iterator, Mapping)) or not hasattr(source, "__iter__"):
                raise ValueError(
                    f"a stream cannot read the type {type(source).__name__}: give paths, a name on the Hugging Face "
                    "hub, or an iterable of texts or records that starts again; of several splits, give one"
                )
            return IterableRecords.from_iterable(source)
        if as_prefix(source) is not None:
            raise ValueError(
                f"{source} is a .bin/.idx pair, which is tokenized already; train on it without a stream"
            )
        if not isinstance(source, str) or Path(source).exists() or not may_be_on_hub(source):
            return DocumentRecords(
                source, seed=self.seed, text_key=self.text_key, on_bad=self._warn
            )
        return IterableRecords.from_iterable(open_hub_dataset(source, self.seed))

    def _text(self, record: Any, number: int) -> str | None:
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
    names = value if isinstance(value, (list, tuple)) else [value]
    return value is None or (bool(names) and all(isinstance(name, (str, Path)) for name in names))


def may_be_on_hub(name: str) -> bool:
    """Returns whether a name that is no local file can be that of a dataset, rather than a misspelled path."""
    return (
        re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*){1,2}", name) is not None
        and not Path(name).parent.is_dir()
    )


def open_hub_dataset(name: str, seed: int) -> Any:
    """Returns the stream of a dataset on the Hugging Face hub, whose files come in another order in each epoch.

    Raises:
        ValueError: there is no such file, folder or dataset, or it cannot be reached.
    """
    import datasets

    parts = name.split("/")
    try:
        path, configuration = "/".join(parts[:2]), "/".join(parts[2:]) or None
        return datasets.load_dataset(path, configuration, split="train", streaming=True).shuffle(
            seed, buffer_size=1
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is no file or folder, and cannot be streamed from the Hugging Face hub "
            f"({type(error).__name__}: {error}); give a path, or a dataset as owner/name or owner/name/configuration"
        ) from None


def _epoch_of(dataset: Any, epoch: int) -> Iterable[Any]:
    number = getattr(dataset, "_epoch", None)
    # Hugging Face datasets shares it between workers, which may be in different epochs.
    if isinstance(number, torch.Tensor) and number.is_shared():
        dataset._epoch = number.clone()
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    return dataset


@contextmanager
def _without_worker() -> Iterator[None]:
    """Hides from the iterable that it is read in a worker.

    Hugging Face streams, and torch's as its manual writes them, give each worker a different part. Here every
    worker must read the whole stream and takes its share afterwards.
    """
    hidden, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = hidden


class StreamLoader(ABC):
    """The base of what loads batches of streams for one rank, and resumes at a bookmark.

    Args:
        num_workers: processes that read ahead. Each reads the whole stream, and makes every `num_workers`-th batch.
    """

    def __init__(self, share: Share, num_workers: int, bookmark: dict[str, Any]) -> None:
        self.share, self.num_workers = share, num_workers
        self._consumed, self._bookmark = 0, bookmark

    def __iter__(self) -> Iterator[Any]:
        generator = (
            torch.Generator()
        )  # else the loader would advance the generator of the caller's dropout
        loader = DataLoader(
            _StreamBatches(self), batch_size=None, num_workers=self.num_workers, generator=generator
        )
        for batch, self._consumed, self._bookmark in loader:
            yield batch

    @abstractmethod
    def share_of(self, worker: int, workers: int) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        """Yields (batch, global samples consumed, bookmark) of one worker from the current state on, in order."""

    @abstractmethod
    def peek(self, count: int) -> list[Any]:
        """Returns the first records of the first epoch."""

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self._consumed, "bookmark": dict(self._bookmark)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of another kind of loader."""
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


class _StreamBatches(IterableDataset):
    """Runs in a worker."""

    def __init__(self, stream: StreamLoader) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from self.stream.share_of(worker, workers)


class ResumableStream(StreamLoader):
    """Loads batches of a stream for one rank; a global batch does not depend on the number of workers or ranks.

    Windows of `shuffle_buffer` records are permuted, each with its own seed. The position of a sample in the global
    batch decides its rank, exactly as in `ResumableLoader`. `state_dict()` holds the number of samples yielded and a
    bookmark of the window of the next one. Resuming, also with other numbers of ranks and workers, reads that window
    again; no sample is repeated or lost. In a worker, the global random generators that a transform or collate
    function may use are seeded from `seed` and the batch's first sample. Randomness in reading the records must
    depend on the epoch alone.

    Args:
        transform: turns (record, generator) into a sample; the generator depends on (seed, sample number) alone.
        shuffle_buffer: records that are permuted together; 0 keeps the order.
        epochs: passes over the stream; None is endless.
        last: what to do with an incomplete last global batch: "drop" it, or "pad" it on every rank with
            copies whose labels are −100. Either way all ranks see the same number of batches.
        collate: turns samples into a batch; default `PadBatch()`.
    """

    def __init__(
        self,
        records: Records,
        transform: Transform,
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
        self.records, self.transform = records, transform
        self.shuffle_buffer, self.seed, self.epochs, self.last = shuffle_buffer, seed, epochs, last
        self.collate = collate or PadBatch()

    def peek(self, count: int) -> list[Any]:
        return [record for record, _ in islice(self.records.read(0, None), count)]

    def share_of(self, worker: int, workers: int) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        size, start = self.share.global_batch, self._consumed
        first = start + self.share.rank * self.share.micro_batch_size  # sample of this rank
        own: list[tuple[int, Any]] = []
        number, record, bookmark = start, None, self._bookmark
        for number, record, bookmark in self._numbered():
            batch, place = divmod(number - start, size)
            if batch % workers != worker:
                continue
            if place // self.share.micro_batch_size == self.share.rank:
                own.append((number, record))
            if place == size - 1:
                yield self._batch(first + batch * size, own), number + 1, bookmark
                own = []
        complete, rest = divmod(number + 1 - start if record is not None else 0, size)
        if rest and self.last == "pad" and complete % workers == worker:
            yield self._batch(first + complete * size, own, (number, record)), number + 1, bookmark

    def _numbered(self) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        """Yields (global number, record, bookmark of its window) of every sample not yet consumed."""
        window = self.shuffle_buffer or UNSHUFFLED_WINDOW
        number, cursor = self._bookmark["number"], self._bookmark["cursor"]
        for epoch in count(self._bookmark["epoch"]):
            if self.epochs is not None and epoch >= self.epochs:
                return
            before = number
            reader = self.records.read(epoch, cursor)
            while part := list(islice(reader, window)):
                bookmark = {"epoch": epoch, "cursor": cursor, "number": number}
                order = np.arange(len(part))
                if self.shuffle_buffer:
                    order = np.random.default_rng([self.seed, 6, number]).permutation(len(part))
                for place, taken in enumerate(order):
                    if number + place >= self._consumed:
                        yield number + place, part[taken][0], bookmark
                number += len(part)
                cursor = part[-1][1]
            if number == before and cursor is None:
                raise ValueError("the stream holds no records")
            cursor = None

    def _batch(
        self, first: int, own: list[tuple[int, Any]], copied: tuple[int, Any] | None = None
    ) -> Any:
        """Returns the batch that begins with sample `first`, completed with copies of `copied` without labels."""
        if get_worker_info() is not None:
            seed_generators(self.seed, first)
        samples = [self._sample(number, record) for number, record in own]
        if copied is not None:
            samples += [without_labels(self._sample(*copied))] * (
                self.share.micro_batch_size - len(samples)
            )
        return self.collate(samples)

    def _sample(self, number: int, record: Any) -> dict[str, Any]:
        return self.transform(record, np.random.default_rng([self.seed, 7, number]))
