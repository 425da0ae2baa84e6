"""Loads one rank's batches of a map-style dataset.

The loader resumes from a single number: how many samples all ranks have consumed together.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from ..labels import without_labels
from ..tokenizers.tokenizer import Tokenizer
from .collate import CollateFunction, PadBatch


class Samples(Protocol):
    """Maps a sample number to a sample; endless unless the loader is given a total."""

    def __getitem__(self, index: int, /) -> Any: ...


def choose_worker_start(num_workers: int) -> str | None:
    """Returns how a loader starts its processes; None leaves it to Python.

    Python 3.14 starts them by a fork server unless it is told otherwise, to which datasets are
    pickled: a generator or a lambda cannot be. They are forked, as by older ones, unless the
    program has chosen "spawn".
    """
    is_new = sys.version_info >= (3, 14)
    if num_workers and is_new and multiprocessing.get_start_method(allow_none=True) != "spawn":
        return "fork"
    return None


@dataclass(frozen=True)
class Share:
    """Says which samples a data-parallel rank takes.

    Global batch t starts at sample t · micro_batch_size · world_size; each rank takes the next
    `micro_batch_size` samples in rank order.
    """

    micro_batch_size: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {self.micro_batch_size}; it must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is not one of the {self.world_size} data-parallel ranks"
            )

    @property
    def global_batch(self) -> int:
        """Samples that all ranks take at once."""
        return self.micro_batch_size * self.world_size


class GlobalBatches:
    """Yields the positions of one rank's micro-batches from `consumed` on.

    It is a batch sampler for torch's DataLoader.

    With a `total`, the last global batch may be incomplete. "drop" leaves it out. "pad" completes
    it on every rank, so that all ranks have the same number of batches: the number `~n` stands for
    a copy of sample n without labels.
    """

    def __init__(
        self,
        share: Share,
        consumed: int = 0,
        total: int | None = None,
        last: Literal["drop", "pad"] = "drop",
    ) -> None:
        if consumed < 0:
            raise ValueError(f"consumed samples are {consumed}; they cannot be negative")
        if total == 0:
            raise ValueError("there are no samples")
        self.share = share
        self.consumed = consumed
        self.total = total
        self.last = last

    def __iter__(self) -> Iterator[list[int]]:
        share = self.share
        start = self.consumed
        while self.total is None or start < self.total:
            stop = start + share.global_batch
            first = start + share.rank * share.micro_batch_size
            numbers = list(range(first, first + share.micro_batch_size))
            if self.total is not None and stop > self.total:
                if self.last == "drop":
                    return
                copy = ~(self.total - 1)
                numbers = [number if number < self.total else copy for number in numbers]
            yield numbers
            start = stop


class ResumableLoader:
    """Loads batches of a map-style dataset for one rank, the same for any number of workers.

    Together, the ranks take the samples from `consumed` on in order, for any number of ranks.
    `state_dict()` counts the batches that were yielded, not those that workers have prefetched. In
    a worker process, the global random generators are seeded from `seed` and the sample's position
    before each sample is read.

    Args:
        dataset: Gives `dataset[n]` for any n (or any n below `total`).
        share: Micro-batch size, rank and number of data-parallel ranks.
        consumed: Samples that all ranks have consumed before.
        total: Number of samples; None for an endless dataset.
        last: What to do with an incomplete last global batch; see `GlobalBatches`.
        collate: Turns samples into a batch; default `PadBatch()`.
        order: Maps a position to a sample number (see `EpochShuffle` and `LengthBuckets`); default:
            the identity.

    Attributes:
        tokenizer: The tokenizer of the samples, if known; the trainer's checkpoints then hold it.
    """

    def __init__(
        self,
        dataset: Samples,
        share: Share,
        *,
        consumed: int = 0,
        total: int | None = None,
        last: Literal["drop", "pad"] = "drop",
        num_workers: int = 0,
        collate: CollateFunction | None = None,
        order: Callable[[int], int] | None = None,
        seed: int = 1234,
    ) -> None:
        self.dataset = dataset
        self.share = share
        self.order = order
        self.consumed = consumed
        self.total = total
        self.last: Literal["drop", "pad"] = last
        self.num_workers = num_workers
        self.collate = collate or PadBatch()
        self.tokenizer: Tokenizer | None = None
        self._ordered = _OrderedSamples(dataset, order, seed)

    def __iter__(self) -> Iterator[Any]:
        batches = GlobalBatches(self.share, self.consumed, self.total, self.last)
        loader = DataLoader(
            self._ordered,  # type: ignore[arg-type]
            batch_sampler=batches,  # type: ignore[arg-type]
            num_workers=self.num_workers,
            multiprocessing_context=choose_worker_start(self.num_workers),
            collate_fn=self.collate,
            # Without a generator of its own, the loader would advance the one of the caller's
            # dropout.
            generator=torch.Generator(),
        )
        for batch in loader:
            self.consumed += self.share.global_batch
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Returns the number of samples that all ranks have consumed."""
        return {"consumed_samples": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state. ValueError for the state of a stream."""
        if state.keys() != {"consumed_samples"}:
            raise ValueError(
                "this state is a position in a stream; "
                "a loader of numbered samples cannot resume from it"
            )
        self.consumed = state["consumed_samples"]


class _OrderedSamples:
    """Indexes the dataset by position in the order; `~n` is a copy of position n without labels."""

    def __init__(self, dataset: Samples, order: Callable[[int], int] | None, seed: int) -> None:
        self.dataset = dataset
        self.order = order
        self.seed = seed

    def __getitem__(self, position: int) -> Any:
        is_copy = position < 0
        if is_copy:
            position = ~position
        if get_worker_info() is not None:
            seed_generators(self.seed, position)
        number = self.order(position) if self.order else position
        sample = self.dataset[number]
        return without_labels(sample) if is_copy else sample


def seed_generators(*key: int) -> None:
    """Seeds Python's, NumPy's and torch's generators of this worker process."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    # torch.manual_seed would also look for devices, which takes longer than reading a sample.
    torch.default_generator.manual_seed(seed)
