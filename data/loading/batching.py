"""Orders and groupings that save padding: shuffling, bucketing by length, packing several samples into one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..objectives.labels import IGNORED


class SizedSamples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]: ...


class EpochShuffle:
    """Sample at place n of an endless run over `size` samples, each epoch shuffled; for
    `ResumableLoader(order=…)`.
    """

    def __init__(self, size: int, seed: int = 1234) -> None:
        if size < 1:
            raise ValueError("there are no samples to shuffle")
        self.size, self.seed = size, seed
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __call__(self, place: int) -> int:
        epoch, within = divmod(place, self.size)
        if self._order[0] != epoch:
            self._order = epoch, self.epoch_order(epoch)
        return int(self._order[1][within])

    def epoch_order(self, epoch: int) -> np.ndarray:
        """All sample numbers, int64 [size], in the order of one epoch."""
        return np.random.default_rng([self.seed, 8, epoch]).permutation(self.size)


class LengthBuckets(EpochShuffle):
    """An epoch's order in which the samples of a global batch have similar lengths.

    Windows of `window` global batches are sorted by length and cut into batches, which are then shuffled.
    Every sample comes once per epoch; batches line up with global batches as long as consumption began at a
    multiple.
    """

    def __init__(self, lengths: Sequence[int], global_batch: int, *, seed: int = 1234, window: int = 50) -> None:
        super().__init__(len(lengths), seed)
        if global_batch < 1 or window < 1:
            raise ValueError(f"global_batch is {global_batch} and window {window}; both must be at least 1")
        self.lengths = np.asarray(lengths)
        self.global_batch, self.window = global_batch, window

    def epoch_order(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng([self.seed, 9, epoch])
        shuffled = generator.permutation(self.size)
        # Epochs follow each other without a gap: the first samples complete the batch that the last epoch
        # began.
        head = min(-epoch * self.size % self.global_batch, self.size)
        stop = head + (self.size - head) // self.global_batch * self.global_batch
        step = self.window * self.global_batch
        windows = [shuffled[start : min(start + step, stop)] for start in range(head, stop, step)]
        ordered = [part[np.argsort(self.lengths[part], kind="stable")] for part in windows]
        batches = np.concatenate([*ordered, shuffled[:0]]).reshape(-1, self.global_batch)
        batches = batches[generator.permutation(len(batches))]
        return np.concatenate([shuffled[:head], batches.ravel(), shuffled[stop:]])


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups of sample numbers whose lengths fit `capacity`: best fit, longest first, in O(n log n).

    Raises:
        ValueError: a sample longer than the capacity.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free, group), sorted
    for number in order:
        length = int(lengths[number])
        if length > capacity:
            raise ValueError(f"sample {number} has {length} tokens, more than a pack of {capacity} holds")
        at = bisect_left(room, (length, -1))
        if at == len(room):
            groups.append([])
            free, group = capacity, len(groups) - 1
        else:
            free, group = room.pop(at)
        groups[group].append(number)
        insort(room, (free - length, group))
    return [sorted(group) for group in groups]


class PackedDataset:
    """Several samples in one of at most `length` tokens, told apart by positions and segments.

    Each item has `input_ids`, `labels`, `position_ids` (from 0 in each sample) and `segment_ids` (1, 2, …;
    padding is 0), int64 [n]. A token may attend only within its segment; the first label of each is −100,
    because the token before it belongs to another.
    """

    def __init__(self, samples: SizedSamples, length: int) -> None:
        self.samples = samples
        self.length = length
        sizes = [len(samples[number]["input_ids"]) for number in range(len(samples))]
        self.groups = pack_lengths(sizes, length)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        parts = [self.samples[number] for number in self.groups[index]]
        sizes = [len(part["input_ids"]) for part in parts]
        labels = [part["labels"].copy() for part in parts]
        for label in labels:
            label[:1] = IGNORED
        return {
            "input_ids": np.concatenate([part["input_ids"] for part in parts]),
            "labels": np.concatenate(labels),
            "position_ids": np.concatenate([np.arange(size) for size in sizes]),
            "segment_ids": np.repeat(np.arange(1, len(sizes) + 1), sizes),
        }
