"""Causal language modelling: documents packed into samples of equal length, without end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .indexed import IndexedDataset

if TYPE_CHECKING:
    import torch

EPOCHS_KEPT = 3  # samples at the border read two epochs; a prefetching loader may look one further back


@dataclass(frozen=True)
class EpochOrder:
    """One pass over the corpus. `documents` is the order, `ends` int64 [documents] their ends in the epoch's
    stream.
    """

    documents: np.ndarray
    ends: np.ndarray
    samples: np.ndarray  # order in which the samples that begin in this epoch are given out


class GPTDataset:
    """Endless samples of `sequence_length` tokens; sample i depends on (corpus, seed, i) alone.

    Each epoch visits the documents in an order of its own. Their tokens form one stream over all epochs (the
    files hold an end-of-text token behind every document), cut into samples that overlap by one token: the
    last token of a sample is the first of the next, so that every token is predicted exactly once per epoch.
    Samples that begin in an epoch are given out in a shuffled order, so that a batch does not consist of one
    long document.

    `d[i]` is `{"input_ids": int64 [S], "labels": int64 [S]}`; the labels equal the input because models shift
    them.

    Raises:
        ValueError: no tokens, or a sequence length below 2.
    """

    def __init__(self, indexed: IndexedDataset, sequence_length: int, seed: int = 1234) -> None:
        if sequence_length < 2:
            raise ValueError(f"sequence_length is {sequence_length}; predicting a next token needs at least 2")
        if indexed.num_tokens == 0:
            raise ValueError(f"{indexed.prefix} holds no tokens")
        if seed < 0:
            raise ValueError(f"the data seed is {seed}; it must not be negative")
        self.indexed = indexed
        self.sequence_length = sequence_length
        self.seed = seed
        self._lengths = indexed.document_lengths()
        self._epoch = lru_cache(maxsize=EPOCHS_KEPT)(self._build_epoch)

    @property
    def tokens_per_epoch(self) -> int:
        return self.indexed.num_tokens

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over the corpus; samples may cross into the next epoch, so this is no whole
        number.
        """
        return self.tokens_per_epoch / (self.sequence_length - 1)

    def epoch_of(self, index: int) -> int:
        """The epoch in which sample `index` begins, from 0."""
        return index * (self.sequence_length - 1) // self.tokens_per_epoch

    def tokens(self, index: int) -> np.ndarray:
        """Sample `index` as int64 [sequence_length]."""
        if index < 0:
            raise IndexError(f"sample {index}: samples count from 0 and have no end")
        epoch = self.epoch_of(index)
        first = self._first_sample(epoch)
        sample = first + int(self._epoch(epoch).samples[index - first])
        return self._read(sample * (self.sequence_length - 1), self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        from torch import from_numpy

        tokens = from_numpy(self.tokens(index))
        return {"input_ids": tokens, "labels": tokens.clone()}

    def __getstate__(self) -> dict[str, object]:
        return {"indexed": self.indexed, "sequence_length": self.sequence_length, "seed": self.seed}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[arg-type]

    def _first_sample(self, epoch: int) -> int:
        """Number of samples that begin before `epoch`."""
        return -(-epoch * self.tokens_per_epoch // (self.sequence_length - 1))

    def _build_epoch(self, epoch: int) -> EpochOrder:
        generator = np.random.default_rng([self.seed, epoch])
        documents = generator.permutation(len(self._lengths))
        count = self._first_sample(epoch + 1) - self._first_sample(epoch)
        return EpochOrder(documents, np.cumsum(self._lengths[documents]), generator.permutation(count))

    def _read(self, position: int, count: int) -> np.ndarray:
        """`count` tokens of the endless stream from `position` on."""
        out = np.empty(count, np.int64)
        filled = 0
        epoch, offset = divmod(position, self.tokens_per_epoch)
        while filled < count:
            order = self._epoch(epoch)
            at = int(np.searchsorted(order.ends, offset, side="right"))
            for number in order.documents[at:]:
                start, stop = self.indexed.token_range(int(number))
                skipped = max(0, offset - (int(order.ends[at]) - (stop - start)))
                part = self.indexed.tokens[start + skipped : min(stop, start + skipped + count - filled)]
                out[filled : filled + len(part)] = part
                filled += len(part)
                at += 1
                if filled == count:
                    break
            epoch, offset = epoch + 1, 0
        return out
