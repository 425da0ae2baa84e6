"""Orders the samples of each epoch: shuffled, or shuffled so that the samples of a batch have
similar lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class EpochShuffle:
    """Maps positions of an endless run to `size` sample numbers, shuffled per epoch.

    It is an order for `ResumableLoader(order=…)`.
    """

    def __init__(self, size: int, seed: int = 1234) -> None:
        if size < 1:
            raise ValueError("there are no samples to shuffle")
        self.size = size
        self.seed = seed
        # The order of the latest epoch is kept, because neighboring positions are asked for in
        # turn.
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def __call__(self, position: int) -> int:
        epoch, within = divmod(position, self.size)
        if self._epoch != epoch:
            self._order = self.epoch_order(epoch)
            self._epoch = epoch
        return int(self._order[within])

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Returns all sample numbers in the order of one epoch: int64 [size]."""
        return np.random.default_rng([self.seed, 8, epoch]).permutation(self.size)


class LengthBuckets(EpochShuffle):
    """Orders an epoch so that the samples of a global batch have similar lengths.

    The shuffled samples are divided into windows of `window` global batches. Each window is sorted
    by length and cut into batches, and the batches are shuffled. Every sample occurs once per
    epoch. The groups coincide with the loader's global batches if the run started at a multiple of
    `global_batch`.

    Args:
        lengths: Tokens of each sample.
        global_batch: Samples that all ranks take at once.
        window: Global batches that are sorted together.
    """

    def __init__(
        self, lengths: Sequence[int], global_batch: int, *, seed: int = 1234, window: int = 50
    ) -> None:
        super().__init__(len(lengths), seed)
        if global_batch < 1 or window < 1:
            raise ValueError(
                f"global_batch is {global_batch} and window {window}; both must be at least 1"
            )
        self.lengths = np.asarray(lengths)
        self.global_batch = global_batch
        self.window = window

    def epoch_order(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng([self.seed, 9, epoch])
        shuffled = generator.permutation(self.size)
        # There is no gap between epochs: the first samples complete the batch that the last epoch
        # began, and the samples from `stop` on begin one that the next epoch completes.
        head = min(-epoch * self.size % self.global_batch, self.size)
        stop = head + (self.size - head) // self.global_batch * self.global_batch
        step = self.window * self.global_batch
        ordered: list[np.ndarray] = []
        for start in range(head, stop, step):
            samples = shuffled[start : min(start + step, stop)]
            by_length = np.argsort(self.lengths[samples], kind="stable")
            ordered.append(samples[by_length])
        ordered.append(shuffled[:0])  # An epoch without a whole batch has no windows to join.
        batches = np.concatenate(ordered).reshape(-1, self.global_batch)  # [batches, global_batch]
        batches = batches[generator.permutation(len(batches))]
        return np.concatenate([shuffled[:head], batches.ravel(), shuffled[stop:]])
