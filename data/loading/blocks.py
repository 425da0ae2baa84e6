"""Pretrains from streams of text: any objective, on blocks of documents that are tokenized while
training runs.

A block is a bounded number of documents in memory, on which the objective's ordinary dataset runs
for one epoch. Nothing is written to a disk. Every rank reads and tokenizes the whole stream, so
that all make the same blocks without communication.
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
from ..text.encoding import BATCH_CHARACTERS, Encoded, encode_documents, find_end_token
from ..tokenizers.tokenizer import Tokenizer
from .loader import Share
from .mixture import MixedSamples
from .pretraining import build_pad_batch
from .stream import RecordSource, StreamLoader

BLOCK_TOKENS = 1 << 22  # 8 to 16 MB in memory; tokenized in seconds, which is what resuming costs


def documents_in_memory(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    split_sentences: bool = False,
    name: str = "the texts in memory",
) -> MemoryDataset:
    """Returns texts as a tokenized corpus, such as those that a stream holds out.

    See `TextStream.beginning`.
    """
    return MemoryDataset(name, *_encode(texts, tokenizer, split_sentences=split_sentences))


def _encode(texts: Sequence[str], tokenizer: Tokenizer, *, split_sentences: bool) -> Encoded:
    """Encodes documents as `prepare_corpus` does."""
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    end = find_end_token(tokenizer, split_sentences=split_sentences)
    return encode_documents(tokenizer, texts, dtype, end, split_sentences=split_sentences)


@dataclass(frozen=True)
class BlockPosition:
    """Where a block begins in its stream.

    Attributes:
        block: Number of the block.
        sample: Number of its first sample.
        epoch: Pass over the stream from which its first document is read.
        cursor: Position in that pass; None is the beginning.
        skip: Tokens after the cursor that belong to the block before.
    """

    block: int = 0
    sample: int = 0
    epoch: int = 0
    cursor: Any = None
    skip: int = 0


class SampleBlock(NamedTuple):
    """The samples of a block, and where it and the next one begin."""

    position: BlockPosition
    samples: PretrainingSamples
    following: BlockPosition


class _DocumentBatch(NamedTuple):
    """Some encoded documents that are neighbors in a stream.

    Attributes:
        epoch: Pass over the stream from which they were read.
        cursor: Where they begin in that pass.
        after: Where the documents after them begin.
        skip: Tokens at their beginning that are left out of `encoded`.
        encoded: Their tokens.
    """

    epoch: int
    cursor: Any
    after: Any
    skip: int
    encoded: Encoded


class BlockMaker:
    """Makes the blocks of one stream, in order.

    A sample of a packed objective need not end with a document. What follows the last sample of a
    block is carried over to the next block, also of the next epoch, so that each token is trained
    on once in each pass.

    Args:
        records: The stream's documents.
        tokenizer: Has the objective's special tokens already.
        config: Objective, lengths and seed.
        seeds: What the seed of each block is derived from, with its number.
        block_tokens: Least number of tokens in a block, except for the last one of an epoch.
        epochs: Passes over the stream; None is endless.
    """

    def __init__(
        self,
        records: RecordSource,
        tokenizer: Tokenizer,
        config: PretrainingData,
        *,
        seeds: tuple[int, ...],
        block_tokens: int,
        epochs: int | None,
    ) -> None:
        self.records = records
        self.tokenizer = tokenizer
        self.config = config
        self.seeds = seeds
        self.block_tokens = block_tokens
        self.epochs = epochs
        self.stopped = threading.Event()
        # Tokens from one sample to the next; 0 if the objective does not pack, None if not known
        # yet.
        self._stride: int | None = None

    def iter_blocks(self, position: BlockPosition) -> Iterator[SampleBlock]:
        """Yields the blocks from a position on; the last one of an epoch may be smaller.

        Raises:
            ValueError: A pass over the stream, or a full block, does not suffice for a sample.
        """
        waiting: list[_DocumentBatch] = []
        problem: ValueError | None = None
        for epoch, batch in self._iter_batches(position):
            is_end_of_epoch = batch is None
            if batch is not None:
                waiting.append(batch)
            tokens = sum(len(each.encoded.tokens) for each in waiting)
            if not waiting or (not is_end_of_epoch and tokens < self.block_tokens):
                continue
            try:
                block, waiting = self._build_block(position, waiting)
            except ValueError as error:
                # Reading on helps only a remainder at the end of an epoch: if a full block or a
                # whole epoch does not suffice for a sample, none will.
                is_whole_epoch = waiting[0].epoch < epoch or waiting[0].cursor is None
                if not is_end_of_epoch or is_whole_epoch:
                    raise
                block = None
                problem = error
            if block is not None:
                yield block
                position = block.following
        if position.block == 0 and not self.stopped.is_set():
            raise problem or ValueError(
                "the stream holds fewer tokens than a sample needs; use more text or epochs"
            )

    def _iter_batches(self, position: BlockPosition) -> Iterator[tuple[int, _DocumentBatch | None]]:
        """Yields (epoch, some documents) from a position on, and (epoch, None) at the end of each
        epoch.
        """
        cursor = position.cursor
        skip = position.skip
        split_sentences = resolve_objective(self.config.objective).split_sentences
        epochs = range(position.epoch, self.epochs) if self.epochs else count(position.epoch)
        for epoch in epochs:
            is_empty = cursor is None
            reader = self.records.read(epoch, cursor)
            while found := _read_texts(reader):
                if self.stopped.is_set():
                    return
                texts = [text for text, _ in found]
                encoded = _encode(texts, self.tokenizer, split_sentences=split_sentences)
                _, encoded = _divide(encoded, skip)
                after = found[-1][1]
                yield epoch, _DocumentBatch(epoch, cursor, after, skip, encoded)
                cursor = after
                skip = 0
                is_empty = False
            if is_empty:
                raise ValueError("the stream holds no documents to train on")
            yield epoch, None
            cursor = None

    def _build_block(
        self, position: BlockPosition, batches: list[_DocumentBatch]
    ) -> tuple[SampleBlock | None, list[_DocumentBatch]]:
        """Builds the block of some documents.

        Returns:
            The block, or None if the documents do not suffice for a sample; and what is left of
            the documents.
        """
        together = _concatenate([batch.encoded for batch in batches])
        if self._stride is None:
            self._stride = getattr(self._build_samples(position, together), "stride", 0)
        used = len(together.tokens)
        if self._stride:
            used -= used % self._stride
        if used == 0:
            return None, batches
        samples = self._build_samples(position, _divide(together, used)[0])
        if self._stride:
            made = used // self._stride
        else:
            made = max(1, int(samples.samples_per_epoch))
        rest = _drop_tokens(batches, used)
        following = BlockPosition(position.block + 1, position.sample + made)
        if rest:
            first = rest[0]
            following = replace(following, epoch=first.epoch, cursor=first.cursor, skip=first.skip)
        else:
            last = batches[-1]
            following = replace(following, epoch=last.epoch, cursor=last.after)
        return SampleBlock(position, samples, following), rest

    def _build_samples(self, position: BlockPosition, encoded: Encoded) -> PretrainingSamples:
        """Builds the objective's dataset of a block, with a seed of its own."""
        sequence = np.random.SeedSequence([*self.seeds, position.block])
        seed = int(sequence.generate_state(1)[0])
        indexed = MemoryDataset(f"block {position.block} of the stream", *encoded)
        return build_dataset(replace(self.config, seed=seed), indexed, self.tokenizer)


def _read_texts(reader: Iterator[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Reads the next (text, cursor after it), as many as are encoded at a time; [] at the end."""
    found: list[tuple[str, Any]] = []
    characters = 0
    while characters < BATCH_CHARACTERS:
        record = next(reader, None)
        if record is None:
            break
        found.append(record)
        characters += len(record[0])
    return found


def _concatenate(parts: Sequence[Encoded]) -> Encoded:
    tokens = np.concatenate([part.tokens for part in parts])
    sizes = np.concatenate([part.sizes for part in parts])
    sequences = [part.sequences for part in parts if part.sequences is not None]
    return Encoded(tokens, sizes, np.concatenate(sequences) if sequences else None)


def _divide(encoded: Encoded, position: int) -> tuple[Encoded, Encoded]:
    """Divides documents of one sequence each before a token.

    A document with that token inside is cut in two.

    Documents of several sequences (sentences) are divided at their beginning or their end only.
    """
    nothing = Encoded(encoded.tokens[:0], encoded.sizes[:0], None)
    if position == 0:
        return nothing, encoded
    if position == len(encoded.tokens):
        return encoded, nothing
    ends = np.cumsum(encoded.sizes)
    cut = int(np.searchsorted(ends, position, side="right"))  # the document that is cut
    start_of_cut = int(ends[cut - 1]) if cut else 0
    inside = position - start_of_cut
    front_sizes = [*encoded.sizes[:cut], inside]
    back_sizes = [encoded.sizes[cut] - inside, *encoded.sizes[cut + 1 :]]
    front = Encoded(encoded.tokens[:position], np.array(front_sizes, np.int64), None)
    back = Encoded(encoded.tokens[position:], np.array(back_sizes, np.int64), None)
    return front, back


def _drop_tokens(batches: list[_DocumentBatch], used: int) -> list[_DocumentBatch]:
    """Returns what is left of some documents without their first `used` tokens."""
    rest: list[_DocumentBatch] = []
    for batch in batches:
        size = len(batch.encoded.tokens)
        if used < size:
            _, left = _divide(batch.encoded, used)
            rest.append(batch._replace(skip=batch.skip + used, encoded=left))
        used = max(0, used - size)
    return rest


class _BlockReader:
    """Holds the current block of a stream; a thread makes the next one in the meantime."""

    def __init__(
        self, maker: BlockMaker, position: BlockPosition, thread: ThreadPoolExecutor
    ) -> None:
        self.position = position
        self._samples: PretrainingSamples | None = None
        self._end = position.sample  # the first sample behind the current block
        self._blocks = maker.iter_blocks(position)
        self._thread = thread
        self._next: Future[SampleBlock | None] = thread.submit(next, self._blocks, None)

    def seek(self, number: int) -> tuple[PretrainingSamples, int] | None:
        """Returns the samples of the block of sample `number`, and its number there; None after the
        end.

        Numbers may not decrease from call to call.
        """
        while number >= self._end:
            # Releasing the current block first keeps two blocks in memory instead of three.
            self._samples = None
            block = self._next.result()
            if block is None:
                return None
            self.position = block.position
            self._samples = block.samples
            self._end = block.following.sample
            self._next = self._thread.submit(next, self._blocks, None)
        assert self._samples is not None
        return self._samples, number - self.position.sample


class BlockStream(StreamLoader):
    """Loads batches of any pretraining objective from streams of text, for
    `Trainer.train(train_dataset=…)`.

    Blocks of documents are tokenized by a thread while training runs on the block before. Each
    block is an epoch of the objective's dataset with its own seed, so samples are shuffled within a
    block. A global batch depends on the streams, the configuration and its place alone, not on the
    number of ranks and workers. A state holds where the current block begins and the number of
    samples consumed; resuming tokenizes that block again.

    Args:
        streams: Documents, such as a `TextStream`; or several, each of which has its own blocks.
        tokenizer: Gets the objective's special tokens if it lacks them.
        config: Objective, lengths, micro-batch size and seed.
        shares: How much of the samples each of several streams has, exact as in `MixedSamples`; by
            default equal.
        rank: Data-parallel rank of this process.
        world_size: Number of data-parallel ranks.
        block_tokens: Least number of tokens in a block, divided between the streams; it bounds the
            memory.
        epochs: Passes over the only stream; None is endless. An incomplete last global batch is
            left out.
        num_workers: See `StreamLoader`; with 0, a thread of this process does the work.

    Raises:
        ValueError: The tokenizer does not suit the objective, or a setting is out of range.
    """

    def __init__(
        self,
        streams: RecordSource | Sequence[RecordSource],
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
                f"epochs is {epochs}, but a mixture of streams is endless; "
                "leave it out, and set train_steps"
            )
        self.order = MixedSamples(self.streams, shares or [1] * len(self.streams))
        bookmark = {
            "block_tokens": block_tokens,
            "sources": [getattr(stream, "identity", None) for stream in self.streams],
            "blocks": [asdict(BlockPosition()) for _ in self.streams],
        }
        super().__init__(Share(config.micro_batch_size, rank, world_size), num_workers, bookmark)
        resolve_objective(config.objective).add_special_tokens(tokenizer)
        self.tokenizer = tokenizer
        self.config = config
        self.block_tokens = block_tokens
        self.epochs = epochs
        self.collate = build_pad_batch(config, tokenizer)

    def peek(self, count: int) -> list[str]:
        found: list[str] = []
        for stream in self.streams:
            found += [text for text, _ in islice(stream.read(0, None), count)]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state.

        Raises:
            ValueError: The state is that of other streams, or their files have changed.
        """
        sources = self._bookmark["sources"]
        super().load_state_dict(state)
        saved_tokens = self._bookmark["block_tokens"]
        saved_streams = len(self._bookmark["blocks"])
        if saved_tokens != self.block_tokens or saved_streams != len(self.streams):
            raise ValueError(
                f"the run read {saved_streams} stream(s) in blocks of {saved_tokens} tokens and "
                f"cannot resume with {len(self.streams)} in blocks of {self.block_tokens}; "
                "set the data and block_tokens to match"
            )
        for stream, saved, current in zip(
            self.streams, self._bookmark["sources"], sources, strict=True
        ):
            if saved != current:
                raise ValueError(
                    f"the stream of {getattr(stream, 'name', type(stream).__name__)} is not the "
                    "one that the run read: its files (names, sizes, order), seed, text_key or "
                    "held_out_fraction differ; restore them, or start a new run from the "
                    "checkpoint's weights"
                )

    def iter_worker(self, worker: int, workers: int) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        # Reading a stream hides from its dataset that it runs in a worker, for the whole process.
        # So one thread reads all streams: two would restore what the other one hides.
        thread = ThreadPoolExecutor(1, thread_name_prefix="blocks")
        makers = [self._build_maker(number) for number in range(len(self.streams))]
        try:
            readers = [
                _BlockReader(maker, BlockPosition(**position), thread)
                for maker, position in zip(makers, self._bookmark["blocks"], strict=True)
            ]
            size = self.share.global_batch
            for batch, start in enumerate(count(self._consumed, size)):
                samples: list[Any] = []
                is_own_batch = batch % workers == worker
                if is_own_batch:
                    first = start + self.share.rank * self.share.micro_batch_size
                    for number in range(first, first + self.share.micro_batch_size):
                        stream, number_there = self.order.locate(number)
                        found = readers[stream].seek(number_there)
                        if found is None:
                            return
                        block, number_in_block = found
                        samples.append((block, number_in_block))
                # All ranks and workers go on to the blocks of the global batch's last samples, so
                # that all make the same bookmark and end at the same batch.
                for stream, used in enumerate(self.order.count_samples(start + size)):
                    if used and readers[stream].seek(used - 1) is None:
                        return
                if is_own_batch:
                    positions = [asdict(reader.position) for reader in readers]
                    bookmark = {**self._bookmark, "blocks": positions}
                    collated = self.collate([block[number] for block, number in samples])
                    yield collated, start + size, bookmark
        finally:
            for maker in makers:
                maker.stopped.set()
            thread.shutdown(wait=False, cancel_futures=True)

    def _build_maker(self, number: int) -> BlockMaker:
        return BlockMaker(
            self.streams[number],
            self.tokenizer,
            self.config,
            seeds=(self.config.seed, 10, number),
            block_tokens=-(-self.block_tokens // len(self.streams)),
            epochs=self.epochs,
        )
