"""Loads batches from streams larger than memory, shuffled in windows and resumable at any batch.

Every worker of every rank reads the whole stream and keeps its share. Reading is cheap compared with tokenizing, and
each worker tokenizes only its share. In return, the order of samples and the end of the stream are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..objectives.labels import without_labels
from ..text.documents import OnBad, fail_on_bad
from ..text.records import read_chunk
from ..text.sources import Source, plan_chunks
from .loader import Collate, PadBatch, Share, seed_generators

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
        self, source: Source, *, seed: int | None = 1234, text_key: str = "text", on_bad: OnBad = fail_on_bad
    ) -> None:
        self.chunks = plan_chunks(source)
        self.seed, self.text_key, self.on_bad = seed, text_key, on_bad

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


class _StreamBatches(IterableDataset):
    """Runs in a worker and yields (batch, global samples consumed, bookmark) for its share, in order."""

    def __init__(self, stream: ResumableStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from self.stream.share_of(worker, workers)


class ResumableStream:
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
        collate: Collate | None = None,
    ) -> None:
        if shuffle_buffer < 0:
            raise ValueError(f"shuffle_buffer is {shuffle_buffer}; it cannot be negative")
        self.records, self.transform, self.share = records, transform, share
        self.shuffle_buffer, self.seed, self.epochs, self.last = shuffle_buffer, seed, epochs, last
        self.num_workers = num_workers
        self.collate = collate or PadBatch()
        self._consumed = 0
        self._bookmark: dict[str, Any] = {"epoch": 0, "cursor": None, "number": 0}

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator()  # else the loader would advance the generator of the caller's dropout
        loader = DataLoader(_StreamBatches(self), batch_size=None, num_workers=self.num_workers, generator=generator)
        for batch, self._consumed, self._bookmark in loader:
            yield batch

    def peek(self, count: int) -> list[Any]:
        """Returns the first records of the first epoch, from the beginning."""
        return [record for record, _ in islice(self.records.read(0, None), count)]

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self._consumed, "bookmark": dict(self._bookmark)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of a loader."""
        if "bookmark" not in state:
            raise ValueError("this state is a position in numbered samples; a stream cannot resume from it")
        self._consumed = state["consumed_samples"]
        self._bookmark = dict(state["bookmark"])

    def share_of(self, worker: int, workers: int) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        """Yields the batches of one worker from the current state on."""
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

    def _batch(self, first: int, own: list[tuple[int, Any]], copied: tuple[int, Any] | None = None) -> Any:
        """Returns the batch that begins with sample `first`, completed with copies of `copied` without labels."""
        if get_worker_info() is not None:
            seed_generators(self.seed, first)
        samples = [self._sample(number, record) for number, record in own]
        if copied is not None:
            samples += [without_labels(self._sample(*copied))] * (self.share.micro_batch_size - len(samples))
        return self.collate(samples)

    def _sample(self, number: int, record: Any) -> dict[str, Any]:
        return self.transform(record, np.random.default_rng([self.seed, 7, number]))
