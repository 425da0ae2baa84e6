"""Batches for one rank, resumable by a single number: how many samples all ranks have consumed together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from ..objectives.labels import without_labels
from .collate import PadBatch

Collate = Callable[[Sequence[Any]], Any]


class Samples(Protocol):
    """A map from sample number to sample; endless unless a loader is told how many there are."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Share:
    """Which samples a data-parallel rank takes: global batch t is the samples from t·b·world_size on, b per
    rank.
    """

    micro_batch_size: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {self.micro_batch_size}; it must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of the {self.world_size} data-parallel ranks")

    @property
    def global_batch(self) -> int:
        """Samples that all ranks take at once."""
        return self.micro_batch_size * self.world_size


class GlobalBatches:
    """Sample numbers of one rank's micro-batches from `consumed` on; a batch sampler for torch's DataLoader.

    With a `total`, the last global batch may be incomplete: "drop" leaves it out; "pad" completes it on every
    rank with places that count nothing (encoded as `~number` of a sample to copy), so that no rank stops
    before others.
    """

    def __init__(
        self, share: Share, consumed: int = 0, total: int | None = None, last: Literal["drop", "pad"] = "drop"
    ) -> None:
        if consumed < 0:
            raise ValueError(f"consumed samples are {consumed}; they cannot be negative")
        if total == 0:
            raise ValueError("there are no samples")
        self.share, self.consumed, self.total, self.last = share, consumed, total, last

    def __iter__(self) -> Iterator[list[int]]:
        start = self.consumed
        while self.total is None or start < self.total:
            stop = start + self.share.global_batch
            if self.total is not None and stop > self.total and self.last == "drop":
                return
            first = start + self.share.rank * self.share.micro_batch_size
            numbers = range(first, first + self.share.micro_batch_size)
            yield [n if self.total is None or n < self.total else ~(self.total - 1) for n in numbers]
            start = stop


class ResumableLoader:
    """Batches of a map-style dataset for one rank; what they hold depends on no number of workers or ranks.

    The samples of steps taken together over all ranks are those from `consumed` on, in order, whatever the
    layout. `state_dict()` counts the batches that were handed out, not those that workers have prefetched. What a
    dataset draws from global random generators follows in workers from the seed and the sample's place alone.

    Args:
        dataset: `dataset[n]`, for any n (or below `total`).
        share: micro-batch size, rank and number of data-parallel ranks.
        collate: samples to batch; default `PadBatch()`.
        order: number of the sample at place n (an epoch's shuffling or bucketing, see `EpochOrder`); default
            n.
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
        collate: Collate | None = None,
        order: Callable[[int], int] | None = None,
        seed: int = 1234,
    ) -> None:
        self.share = share
        self.consumed = consumed
        self.total = total
        self.last: Literal["drop", "pad"] = last
        self.num_workers = num_workers
        self.collate = collate or PadBatch()
        self._view = _Placed(dataset, order, seed)

    def __iter__(self) -> Iterator[Any]:
        batches = GlobalBatches(self.share, self.consumed, self.total, self.last)
        loader = DataLoader(
            self._view,  # type: ignore[arg-type]
            batch_sampler=batches,  # type: ignore[arg-type]
            num_workers=self.num_workers,
            collate_fn=self.collate,
            generator=torch.Generator(),  # else the loader would advance the generator of the caller's dropout
        )
        for batch in loader:
            self.consumed += self.share.global_batch
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"consumed_samples": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError for the state of a stream."""
        if state.keys() != {"consumed_samples"}:
            raise ValueError("the position is one in a stream, and this is a loader of numbered samples; use a stream")
        self.consumed = state["consumed_samples"]


class _Placed:
    """The dataset by place in the order, with `~n` for a copy of n that counts nothing."""

    def __init__(self, dataset: Samples, order: Callable[[int], int] | None, seed: int) -> None:
        self.dataset, self.order, self.seed = dataset, order, seed

    def __getitem__(self, place: int) -> Any:
        number = place if place >= 0 else ~place
        if get_worker_info() is not None:
            seed_generators(self.seed, number)
        sample = self.dataset[self.order(number) if self.order else number]
        return sample if place >= 0 else without_labels(sample)


def seed_generators(*key: int) -> None:
    """Seeds Python's, NumPy's and torch's generators of this worker process."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # without a look at devices, which takes longer than all the rest
