"""Packs several short samples into one of a fixed capacity."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..labels import IGNORED


class SizedSamples(Protocol):
    """Maps each number below its length to a sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]: ...


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups sample numbers so that the lengths of a group sum to at most `capacity`.

    The algorithm is best fit, longest first, in O(n log n).

    Raises:
        ValueError: A sample is longer than the capacity.
    """
    longest_first = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    groups: list[list[int]] = []
    free_space: list[tuple[int, int]] = []  # (free tokens, group), sorted
    for number in longest_first:
        length = int(lengths[number])
        if length > capacity:
            raise ValueError(
                f"sample {number} has {length} tokens, more than the capacity {capacity} of a pack"
            )
        best_fit = bisect_left(free_space, (length, -1))
        if best_fit == len(free_space):
            free = capacity
            group = len(groups)
            groups.append([])
        else:
            free, group = free_space.pop(best_fit)
        groups[group].append(number)
        insort(free_space, (free - length, group))
    return [sorted(group) for group in groups]


class PackedDataset:
    """Packs several samples into one of at most `length` tokens.

    Positions and segments separate them.

    Each item has `input_ids`, `labels`, `position_ids` (from 0 in each sample) and `segment_ids`
    (1, 2, …; padding is 0), int64 [n]. A token may attend only within its segment. The first label
    of each segment is −100, because the token before it belongs to another segment.
    """

    def __init__(self, samples: SizedSamples, length: int) -> None:
        self.samples = samples
        self.length = length
        sizes = [len(samples[number]["input_ids"]) for number in range(len(samples))]
        self.groups = pack_lengths(sizes, length)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        samples = [self.samples[number] for number in self.groups[index]]
        sizes = [len(sample["input_ids"]) for sample in samples]
        labels = [sample["labels"].copy() for sample in samples]
        for own_labels in labels:
            own_labels[:1] = IGNORED
        return {
            "input_ids": np.concatenate([sample["input_ids"] for sample in samples]),
            "labels": np.concatenate(labels),
            "position_ids": np.concatenate([np.arange(size) for size in sizes]),
            "segment_ids": np.repeat(np.arange(1, len(sizes) + 1), sizes),
        }


class PackedBlanks(PackedDataset):
    """Packs several samples of `BlankDataset`, such as GLM's, into one of at most `length` tokens.

    Each item has `input_ids` and `labels`, int64 [n]; `position_ids` [2, n], as in each sample;
    `prefix_lengths` [n], the length of part A of each token's sample; and `segment_ids` (1, 2, …).
    """

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        samples = [self.samples[number] for number in self.groups[index]]
        sizes = [len(sample["input_ids"]) for sample in samples]
        item = {
            name: np.concatenate([sample[name] for sample in samples], axis=-1)
            for name in ("input_ids", "labels", "position_ids")
        }
        prefixes = [int(sample["attention_mask"]) for sample in samples]
        item["prefix_lengths"] = np.repeat(prefixes, sizes)
        item["segment_ids"] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        return item
