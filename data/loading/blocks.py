"""Pretrains from streams of text: any objective, on blocks of documents that are tokenized while training runs.

A block is a bounded number of documents in memory, on which the objective's ordinary dataset runs for one epoch.
Nothing is written to a disk. Every rank reads and tokenizes the whole stream, so that all make the same blocks without
communication.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from ..indexed.dataset import MemoryDataset
from ..indexed.format import dtype_for_vocabulary
from ..objectives.objective import PretrainingData, PretrainingSamples
from ..objectives.registry import build_dataset, resolve_objective
from ..text.encoding import BATCH_CHARACTERS, Encoded, encode_documents, end_token
from ..tokenizers.tokenizer import Tokenizer
from .loader import Share
from .mixture import MixedSamples
from .pretraining import build_pad_batch
from .stream import Records, StreamLoader

BLOCK_TOKENS = 1 << 22  # 8 to 16 MB in memory; tokenized in seconds, which is what resuming costs


def encode(texts: Sequence[str], tokenizer: Tokenizer, *, split_sentences: bool) -> Encoded:
    """Encodes documents as `prepare_corpus` does."""
    dtype, end = (
        dtype_for_vocabulary(tokenizer.vocab_size),
        end_token(tokenizer, split_sentences=split_sentences),
    )
    return encode_documents(tokenizer, texts, dtype, end, split_sentences=split_sentences)


def documents_in_memory(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    split_sentences: bool = False,
    name: str = "the texts in memory",
) -> MemoryDataset:
    """Returns texts as a tokenized corpus, such as those that a stream holds out (`TextStream.beginning`)."""
    return MemoryDataset(name, *encode(texts, tokenizer, split_sentences=split_sentences))


@dataclass(frozen=True)
class Place:
    """Where a block begins.

    Attributes:
        block: number of the block in its stream.
        sample: number of its first sample in its stream.
        epoch: pass over the stream from which its first document is read.
        cursor: position in that pass; None is the beginning.
        skip: tokens after the cursor that belong to the block before.
    """

    block: int = 0
    sample: int = 0
    epoch: int = 0
    cursor: Any = None
    skip: int = 0


class Block(NamedTuple):
    """The samples of a block, and where it and the next one begin."""

    place: Place
    samples: PretrainingSamples
    following: Place


class _Part(NamedTuple):
    """Some documents, where they begin and end in the stream, and the tokens at their beginning that are left out."""

    epoch: int
    cursor: Any
    after: Any
    skip: int
    encoded: Encoded


class BlockMaker:
    """Makes the blocks of one stream, in order.

    A sample of a packed objective need not end with a document. What follows the last sample of a block is carried over
    to the next block, also of the next epoch, so that each token is trained on once in each pass.
    """

    def __init__(
        self,
        records: Records,
        tokenizer: Tokenizer,
        config: PretrainingData,
        *,
        seeds: tuple[int, ...],
        block_tokens: int,
        epochs: int | None,
    ) -> None:
        self.records, self.tokenizer, self.config = records, tokenizer, config
        self.seeds, self.block_tokens, self.epochs = seeds, block_tokens, epochs
        self.stopped = threading.Event()
        self._stride: int | None = None

    def blocks(self, place: Place) -> Iterator[Block]:
        """Yields the blocks from a place on; the last one of an epoch may be smaller.

        Raises:
            ValueError: a pass over the stream, or a full block, does not suffice for a sample.
        """
        waiting: list[_Part] = []
        problem: ValueError | None = None
        for epoch, part in self._parts(place):
            waiting += [part] if part else []
            if not waiting or (
                part and sum(len(each.encoded.tokens) for each in waiting) < self.block_tokens
            ):
                continue
            try:
                block, waiting = self._block(place, waiting)
            except ValueError as error:
                if part or waiting[0].epoch < epoch or waiting[0].cursor is None:
                    raise  # reading on would not help
                block, problem = None, error
            if block:
                yield block
                place = block.following
        if place.block == 0 and not self.stopped.is_set():
            raise problem or ValueError(
                "the stream holds fewer tokens than a sample needs; use more text or epochs"
            )

    def _parts(self, place: Place) -> Iterator[tuple[int, _Part | None]]:
        """Yields (epoch, some documents) from a place on, and (epoch, None) at the end of each epoch."""
        cursor, skip = place.cursor, place.skip
        split = resolve_objective(self.config.objective).split_sentences
        for epoch in range(place.epoch, self.epochs) if self.epochs else count(place.epoch):
            is_empty, reader = cursor is None, self.records.read(epoch, cursor)
            while found := list(_some(reader)):
                if self.stopped.is_set():
                    return
                encoded = encode([text for text, _ in found], self.tokenizer, split_sentences=split)
                after, is_empty = found[-1][1], False
                yield epoch, _Part(epoch, cursor, after, skip, _divide(encoded, skip)[1])
                cursor, skip = after, 0
            if is_empty:
                raise ValueError("the stream holds no documents to train on")
            yield epoch, None
            cursor = None

    def _block(self, place: Place, parts: list[_Part]) -> tuple[Block | None, list[_Part]]:
        """Returns the block of some documents, None if they do not suffice for a sample, and what is left of them."""
        together = _joined([part.encoded for part in parts])
        if self._stride is None:
            self._stride = getattr(self._samples(place, together), "stride", 0)
        used = len(together.tokens)
        used -= used % self._stride if self._stride else 0
        if not used:
            return None, parts
        samples = self._samples(place, _divide(together, used)[0])
        made = used // self._stride if self._stride else max(1, int(samples.samples_per_epoch))
        rest = _after(parts, used)
        begin = (
            (rest[0].epoch, rest[0].cursor, rest[0].skip)
            if rest
            else (parts[-1].epoch, parts[-1].after, 0)
        )
        return Block(place, samples, Place(place.block + 1, place.sample + made, *begin)), rest

    def _samples(self, place: Place, encoded: Encoded) -> PretrainingSamples:
        seed = int(np.random.SeedSequence([*self.seeds, place.block]).generate_state(1)[0])
        indexed = MemoryDataset(f"block {place.block} of the stream", *encoded)
        return build_dataset(replace(self.config, seed=seed), indexed, self.tokenizer)


def _some(reader: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields the next documents, as many as are encoded at a time."""
    size = 0
    while size < BATCH_CHARACTERS and (found := next(reader, None)) is not None:
        size += len(found[0])
        yield found


def _joined(parts: Sequence[Encoded]) -> Encoded:
    tokens, sizes = (
        np.concatenate(arrays) for arrays in ([p.tokens for p in parts], [p.sizes for p in parts])
    )
    sequences = [part.sequences for part in parts if part.sequences is not None]
    return Encoded(tokens, sizes, np.concatenate(sequences) if sequences else None)


def _divide(encoded: Encoded, at: int) -> tuple[Encoded, Encoded]:
    """Divides documents of one sequence each before token `at`; the one with that token is cut in two."""
    if at in (0, len(encoded.tokens)):
        nothing = Encoded(encoded.tokens[:0], encoded.sizes[:0], None)
        return (nothing, encoded) if at == 0 else (encoded, nothing)
    ends = np.cumsum(encoded.sizes)
    cut = int(np.searchsorted(ends, at, side="right"))
    inside = at - (int(ends[cut - 1]) if cut else 0)
    front, back = (
        [*encoded.sizes[:cut], inside],
        [encoded.sizes[cut] - inside, *encoded.sizes[cut + 1 :]],
    )
    return (
        Encoded(encoded.tokens[:at], np.array(front, np.int64), None),
        Encoded(encoded.tokens[at:], np.array(back, np.int64), None),
    )


def _after(parts: list[_Part], used: int) -> list[_Part]:
    """Returns what is left of some documents without their first `used` tokens."""
    rest: list[_Part] = []
    for part in parts:
        size = len(part.encoded.tokens)
        if used < size:
            rest.append(
                part._replace(skip=part.skip + used, encoded=_divide(part.encoded, used)[1])
            )
        used = max(0, used - size)
    return rest


class _Reading:
    """The current block of a stream; a thread makes the next one in the meantime."""

    def __init__(self, maker: BlockMaker, place: Place, thread: ThreadPoolExecutor) -> None:
        self.place, self.maker = place, maker
        self._samples: PretrainingSamples | None = None
        self._end = place.sample
        self._blocks, self._thread = maker.blocks(place), thread
        self._next: Future[Block | None] = thread.submit(next, self._blocks, None)

    def at(self, number: int) -> tuple[PretrainingSamples, int] | None:
        """Returns the samples of the block of sample `number`, and its number there; None after the end.

        Numbers may not decrease.
        """
        while number >= self._end:
            self._samples = None  # so that there are two blocks in memory, not three
            block = self._next.result()
            if block is None:
                return None
            self.place, self._samples, self._end = (
                block.place,
                block.samples,
                block.following.sample,
            )
            self._next = self._thread.submit(next, self._blocks, None)
        assert self._samples is not None
        return self._samples, number - self.place.sample


class BlockStream(StreamLoader):
    """Loads batches of any pretraining objective from streams of text, for `Trainer.train(train_dataset=…)`.

    Blocks of documents are tokenized by a thread while training runs on the block before. Each block is an epoch of the
    objective's dataset with its own seed, so samples are shuffled within a block. A global batch depends on the
    streams, the configuration and its place alone, not on the number of ranks and workers. A state holds where the
    current block begins and the number of samples consumed; resuming tokenizes that block again.

    Args:
        streams: documents, such as a `TextStream`; or several, each of which has its own blocks.
        tokenizer: gets the objective's special tokens if it lacks them.
        config: objective, lengths, micro-batch size and seed.
        shares: how much of the samples each of several streams has, exact as in `MixedSamples`; by default equal.
        rank: data-parallel rank of this process.
        world_size: data-parallel ranks.
        block_tokens: least number of tokens in a block, divided between the streams; it bounds the memory.
        epochs: passes over the only stream; None is endless. An incomplete last global batch is left out.
        num_workers: see `StreamLoader`; with 0, a thread of this process does the work.

    Raises:
        ValueError: the tokenizer does not suit the objective, or a setting is out of range.
    """

    def __init__(
        self,
        streams: Records | Sequence[Records],
        tokenizer: Tokenizer,
        config: PretrainingData,
        *,
        shares: Sequence[float | Fraction] | None = None,
        rank: int = 0,
        world_size: int = 1,
        block_tokens: int = BLOCK_TOKENS,
        epochs: int | None = None,
        num_workers: int = 0,
    ) -> None:
        self.streams: list[Any] = list(streams) if isinstance(streams, Sequence) else [streams]
        if block_tokens < 1 or (epochs is not None and epochs < 1):
            raise ValueError(
                f"block_tokens is {block_tokens} and epochs {epochs}; both must be at least 1"
            )
        if epochs is not None and len(self.streams) > 1:
            raise ValueError(
                f"epochs is {epochs}, but a mixture of streams is endless; leave it out, and set train_steps"
            )
        self.order = MixedSamples(self.streams, shares or [1] * len(self.streams))
        bookmark = {
            "block_tokens": block_tokens,
            "sources": [getattr(stream, "identity", None) for stream in self.streams],
            "blocks": [asdict(Place()) for _ in self.streams],
        }
        super().__init__(Share(config.micro_batch_size, rank, world_size), num_workers, bookmark)
        resolve_objective(config.objective).add_special_tokens(tokenizer)
        self.tokenizer, self.config = tokenizer, config
        self.block_tokens, self.epochs = block_tokens, epochs
        self.collate = build_pad_batch(config, tokenizer)

    def peek(self, count: int) -> list[str]:
        return [text for stream in self.streams for text, _ in islice(stream.read(0, None), count)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state is that of other streams, or their files have changed."""
        sources = self._bookmark["sources"]
        super().load_state_dict(state)
        saved = self._bookmark["block_tokens"], len(self._bookmark["blocks"])
        if saved != (self.block_tokens, len(self.streams)):
            raise ValueError(
                f"the run read {saved[1]} stream(s) in blocks of {saved[0]} tokens and cannot resume with "
                f"{len(self.streams)} in blocks of {self.block_tokens}; set the data and block_tokens to match"
            )
        for stream, before, now in zip(
            self.streams, self._bookmark["sources"], sources, strict=True
        ):
            if before != now:
                raise ValueError(
                    f"the stream of {getattr(stream, 'name', type(stream).__name__)} is not the one that the run read: "
                    "its files (names, sizes, order), seed, text_key or held_out_fraction differ; restore them, or "
                    "start a new run from the checkpoint's weights"
                )

    def share_of(self, worker: int, workers: int) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        size, micro = self.share.global_batch, self.share.micro_batch_size
        # A stream hides from its dataset that it runs in a worker, for the whole process: one thread reads all streams.
        thread = ThreadPoolExecutor(1, thread_name_prefix="blocks")
        makers = [self._maker(number) for number in range(len(self.streams))]
        try:
            places = [Place(**place) for place in self._bookmark["blocks"]]
            readings = [
                _Reading(maker, place, thread) for maker, place in zip(makers, places, strict=True)
            ]
            for batch, start in enumerate(count(self._consumed, size)):
                first = start + self.share.rank * micro
                own = range(first, first + micro) if batch % workers == worker else ()
                found = [
                    readings[stream].at(number) for stream, number in map(self.order.place, own)
                ]
                # All ranks and workers go on to the blocks of the last samples, so that all make the same bookmark.
                ends = [
                    readings[stream].at(used - 1)
                    for stream, used in enumerate(self.order.counts(start + size))
                    if used
                ]
                if None in ends:
                    return
                if own:
                    blocks = [asdict(reading.place) for reading in readings]
                    bookmark = {**self._bookmark, "blocks": blocks}
                    yield (
                        self.collate([each[0][each[1]] for each in found if each]),
                        start + size,
                        bookmark,
                    )
        finally:
            for maker in makers:
                maker.stopped.set()
            thread.shutdown(wait=False, cancel_futures=True)

    def _maker(self, number: int) -> BlockMaker:
        return BlockMaker(
            self.streams[number],
            self.tokenizer,
            self.config,
            seeds=(self.config.seed, 10, number),
            block_tokens=-(-self.block_tokens // len(self.streams)),
            epochs=self.epochs,
        )
