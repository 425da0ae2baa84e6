"""Packs documents end to end and cuts them into an endless series of samples of equal length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..indexed.dataset import IndexedDataset
from ..indexed.index_building import sample_index

Transform = Callable[[np.ndarray, np.random.Generator], dict[str, np.ndarray]]

# A sample at the border reads two epochs, and a prefetching loader may need the epoch before.
EPOCHS_KEPT = 3


@dataclass(frozen=True)
class EpochOrder:
    """The order of one pass over the corpus.

    Attributes:
        documents: The documents in reading order: int64 [documents].
        starts: Where each sample begins, as an index into `documents` and an offset in that
            document: int64 [samples, 2].
        shuffled: The shuffled order of the samples: int64 [samples].
    """

    documents: np.ndarray
    starts: np.ndarray
    shuffled: np.ndarray


class PackedTokens:
    """Endless runs of `length` tokens.

    `tokens(i)` depends on (corpus, length, overlap, seed, i) alone.

    Each epoch shuffles the documents. Their tokens form one stream over all epochs (the files hold
    an end-of-text token after every document), and a sample begins every `length - overlap` tokens.
    The samples that begin in an epoch are shuffled too, so that a batch does not consist of one
    long document.

    Attributes:
        stride: Tokens between the beginnings of samples.

    Raises:
        ValueError: The corpus has no tokens, the seed is negative, or the overlap is not shorter
            than a sample.
    """

    def __init__(
        self, indexed: IndexedDataset, length: int, *, overlap: int = 0, seed: int = 1234
    ) -> None:
        if not 0 <= overlap < length:
            raise ValueError(
                f"samples of {length} tokens cannot overlap by {overlap}; use 0 to {length - 1}"
            )
        if indexed.num_tokens == 0:
            raise ValueError(f"{indexed.prefix} holds no tokens")
        if seed < 0:
            raise ValueError(f"the data seed is {seed}; it must not be negative")
        self.indexed = indexed
        self.length = length
        self.overlap = overlap
        self.seed = seed
        self.stride = length - overlap
        self._lengths = indexed.document_lengths()
        self._epochs: dict[int, EpochOrder] = {}

    @property
    def tokens_per_epoch(self) -> int:
        return self.indexed.num_tokens

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over the corpus.

        The number is not an integer, because samples may extend into the next epoch.
        """
        return self.tokens_per_epoch / self.stride

    def find_epoch(self, index: int) -> int:
        """Returns the epoch in which sample `index` begins, counted from 0."""
        return index * self.stride // self.tokens_per_epoch

    def tokens(self, index: int) -> np.ndarray:
        """Returns sample `index`: int64 [length]."""
        return self.tokens_and_beginnings(index)[0]

    def tokens_and_beginnings(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns sample `index`: int64 [length], and where its documents begin: int64 [documents].

        The first is 0: a document that began in another sample begins anew in this one.
        """
        if index < 0:
            raise IndexError(f"sample {index}: samples count from 0 and have no end")
        epoch = self.find_epoch(index)
        order = self._get_epoch(epoch)
        sample = order.shuffled[index - self._count_samples_before(epoch)]
        place, offset = order.starts[sample]
        out = np.empty(self.length, np.int64)
        sizes = self._copy(order, int(place), int(offset), out)
        while sum(sizes) < self.length:
            epoch += 1
            sizes += self._copy(self._get_epoch(epoch), 0, 0, out[sum(sizes) :])
        ends = np.cumsum([size for size in sizes if size])
        return out, np.concatenate([[0], ends[:-1]]).astype(np.int64)

    def __getstate__(self) -> dict[str, object]:
        return {
            "indexed": self.indexed,
            "length": self.length,
            "overlap": self.overlap,
            "seed": self.seed,
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[arg-type]

    def _count_samples_before(self, epoch: int) -> int:
        """Returns the number of samples that begin before `epoch`."""
        return -(-epoch * self.tokens_per_epoch // self.stride)

    def _get_epoch(self, epoch: int) -> EpochOrder:
        if epoch not in self._epochs:
            if len(self._epochs) == EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = self._build_epoch(epoch)
        return self._epochs[epoch]

    def _build_epoch(self, epoch: int) -> EpochOrder:
        generator = np.random.default_rng([self.seed, epoch])
        documents = generator.permutation(len(self._lengths))
        first = self._count_samples_before(epoch)
        following = self._count_samples_before(epoch + 1)
        begin = first * self.stride - epoch * self.tokens_per_epoch
        starts = sample_index(self._lengths[documents], begin, self.stride, following - first)
        return EpochOrder(documents, starts, generator.permutation(following - first))

    def _copy(self, order: EpochOrder, place: int, offset: int, out: np.ndarray) -> list[int]:
        """Fills `out` from a position in the epoch up to the epoch's end.

        Returns:
            The number of tokens that were copied of each document.
        """
        filled = 0
        sizes: list[int] = []
        while filled < len(out) and place < len(order.documents):
            start, stop = self.indexed.token_range(int(order.documents[place]))
            begin = start + offset
            part = self.indexed.tokens[begin : min(stop, begin + len(out) - filled)]
            out[filled : filled + len(part)] = part
            filled += len(part)
            sizes.append(len(part))
            place += 1
            offset = 0
        return sizes


class ObjectiveDataset:
    """Endless samples `objective(tokens, generator)` of packed runs.

    Sample i depends on (corpus, settings, seed, i).

    Args:
        length: Tokens of a sample, including `prefix` and `suffix`.
        prefix: Ids put before the run, such as [CLS].
        suffix: Ids put after the run, such as [SEP].
        separate_documents: Samples also have `seq_idx` int64 [length], the number of each token's
            document in the sample. The prefix belongs to the first one, the suffix to the last.
            Then the objective must not change the number of tokens.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        length: int,
        objective: Transform,
        *,
        seed: int = 1234,
        prefix: tuple[int, ...] = (),
        suffix: tuple[int, ...] = (),
        separate_documents: bool = False,
    ) -> None:
        inner = length - len(prefix) - len(suffix)
        if inner < 2:
            raise ValueError(
                f"{length} tokens leave {inner} for text; use at least {length + 2 - inner}"
            )
        self.packed = PackedTokens(indexed, inner, seed=seed)
        self.objective = objective
        self.seed = seed
        self.prefix = prefix
        self.suffix = suffix
        self.separate_documents = separate_documents

    @property
    def stride(self) -> int:
        return self.packed.stride

    @property
    def samples_per_epoch(self) -> float:
        return self.packed.samples_per_epoch

    @property
    def tokens_per_epoch(self) -> int:
        return self.packed.tokens_per_epoch

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        run, beginnings = self.packed.tokens_and_beginnings(index)
        tokens = np.concatenate([self.prefix, run, self.suffix])
        generator = np.random.default_rng([self.seed, 2, index])
        sample = self.objective(tokens.astype(np.int64), generator)
        if self.separate_documents:
            lengths = np.diff(beginnings, append=len(run))
            lengths[0] += len(self.prefix)
            lengths[-1] += len(self.suffix)
            sample["seq_idx"] = np.repeat(np.arange(len(lengths)), lengths)
        return sample
