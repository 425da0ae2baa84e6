"""Turns samples into batches: orders, bucketing by length, packing, padding, and a loader of one rank's batches.

The loader resumes from a single number: how many samples all ranks have consumed together.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from ..objectives.labels import IGNORED, without_labels
from ..tokenizers.tokenizer import Tokenizer

Collate = Callable[[Sequence[Any]], Any]


class Samples(Protocol):
    """Maps a sample number to a sample; endless unless the loader is given a total."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Share:
    """Says which samples a data-parallel rank takes.

    Global batch t starts at sample t · micro_batch_size · world_size; each rank takes the next `micro_batch_size`
    samples in rank order.
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
    """Yields the sample numbers of one rank's micro-batches from `consumed` on; a batch sampler for DataLoader.

    With a `total`, the last global batch may be incomplete. "drop" leaves it out. "pad" completes it on every rank,
    so that all ranks have the same number of batches: the number `~n` stands for a copy of sample n without labels.
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
        self.share, self.consumed, self.total, self.last = share, consumed, total, last

    def __iter__(self) -> Iterator[list[int]]:
        start = self.consumed
        while self.total is None or start < self.total:
            stop = start + self.share.global_batch
            if self.total is not None and stop > self.total and self.last == "drop":
                return
            first = start + self.share.rank * self.share.micro_batch_size
            numbers = range(first, first + self.share.micro_batch_size)
            yield [
                n if self.total is None or n < self.total else ~(self.total - 1) for n in numbers
            ]
            start = stop


class ResumableLoader:
    """Loads batches of a map-style dataset for one rank, the same for any number of workers.

    Together, the ranks take the samples from `consumed` on in order, for any number of ranks. `state_dict()` counts
    the batches that were yielded, not those that workers have prefetched. In a worker process, the global random
    generators are seeded from `seed` and the sample's position before each sample is read.

    Args:
        dataset: gives `dataset[n]` for any n (or any n below `total`).
        share: micro-batch size, rank and number of data-parallel ranks.
        consumed: samples that all ranks have consumed before.
        total: number of samples; None for an endless dataset.
        last: what to do with an incomplete last global batch; see `GlobalBatches`.
        collate: turns samples into a batch; default `PadBatch()`.
        order: maps a position to a sample number (see `EpochShuffle` and `LengthBuckets`); default: the identity.

    Attributes:
        tokenizer: the tokenizer of the samples, if known; the trainer's checkpoints then hold it.
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
        self.dataset, self.share, self.order = dataset, share, order
        self.consumed = consumed
        self.total = total
        self.last: Literal["drop", "pad"] = last
        self.num_workers = num_workers
        self.collate = collate or PadBatch()
        self.tokenizer: Tokenizer | None = None
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
        """Raises ValueError for the state of a stream."""
        if state.keys() != {"consumed_samples"}:
            raise ValueError(
                "this state is a position in a stream; a loader of numbered samples cannot resume from it"
            )
        self.consumed = state["consumed_samples"]


class _Placed:
    """Indexes the dataset by position in the order; `~n` is a copy of position n without labels."""

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
    torch.default_generator.manual_seed(
        seed
    )  # not torch.manual_seed, which checks devices and takes longer


class SizedSamples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]: ...


class EpochShuffle:
    """Maps positions of an endless run to `size` sample numbers, shuffled per epoch; for `ResumableLoader(order=…)`."""

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
        """Returns all sample numbers in the order of one epoch: int64 [size]."""
        return np.random.default_rng([self.seed, 8, epoch]).permutation(self.size)


class LengthBuckets(EpochShuffle):
    """Orders an epoch so that the samples of a global batch have similar lengths.

    The shuffled samples are divided into windows of `window` global batches. Each window is sorted by length and
    cut into batches, and the batches are shuffled. Every sample occurs once per epoch. The groups coincide with
    the loader's global batches if the run started at a multiple of `global_batch`.

    Args:
        lengths: tokens of each sample.
        global_batch: samples that all ranks take at once.
        window: global batches that are sorted together.
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
        self.global_batch, self.window = global_batch, window

    def epoch_order(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng([self.seed, 9, epoch])
        shuffled = generator.permutation(self.size)
        # There is no gap between epochs: the first samples complete the batch that the last epoch began.
        head = min(-epoch * self.size % self.global_batch, self.size)
        stop = head + (self.size - head) // self.global_batch * self.global_batch
        step = self.window * self.global_batch
        windows = [shuffled[start : min(start + step, stop)] for start in range(head, stop, step)]
        ordered = [part[np.argsort(self.lengths[part], kind="stable")] for part in windows]
        batches = np.concatenate([*ordered, shuffled[:0]]).reshape(-1, self.global_batch)
        batches = batches[generator.permutation(len(batches))]
        return np.concatenate([shuffled[:head], batches.ravel(), shuffled[stop:]])


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups sample numbers so that the lengths of a group sum to at most `capacity`.

    The algorithm is best fit, longest first, in O(n log n).

    Raises:
        ValueError: a sample is longer than the capacity.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free, group), sorted
    for number in order:
        length = int(lengths[number])
        if length > capacity:
            raise ValueError(
                f"sample {number} has {length} tokens, more than the capacity {capacity} of a pack"
            )
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
    """Packs several samples into one of at most `length` tokens; positions and segments separate them.

    Each item has `input_ids`, `labels`, `position_ids` (from 0 in each sample) and `segment_ids` (1, 2, …;
    padding is 0), int64 [n]. A token may attend only within its segment. The first label of each segment is −100,
    because the token before it belongs to another segment.
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


@dataclass(frozen=True)
class PadBatch:
    """Stacks samples (dicts of arrays) into `{name: tensor [B, …]}`; the last dimension is padded if lengths differ.

    `input_ids` are padded with `pad_token_id`, labels with −100, and everything else with 0. If the samples have no
    `attention_mask`, one is added: int64 in the shape of `input_ids`, 1 on tokens and 0 on padding.

    Args:
        pad_token_id: padding of `input_ids`.
        lengths: fixed length of a name's last dimension, such as {"input_ids": 512, "labels": 128}; a longer
            sample is a ValueError. Other names are padded to the longest sample.
        multiple_of: padded lengths are rounded up to a multiple of this (8 suits tensor cores; sequence parallelism
            needs its number of ranks). It does not apply to labels that are no integers.
        attention_mask: whether to add the mask.
    """

    pad_token_id: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    multiple_of: int = 1
    attention_mask: bool = True

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:

        if not samples:
            raise ValueError("a batch needs at least one sample")
        check_names(samples)
        rows = {name: [np.asarray(sample[name]) for sample in samples] for name in samples[0]}
        batch = {name: self._stack(name, values) for name, values in rows.items()}
        if self.attention_mask and "attention_mask" not in batch and "input_ids" in batch:
            tokens = [np.ones_like(value, np.int64) for value in rows["input_ids"]]
            batch["attention_mask"] = _pad(tokens, batch["input_ids"].shape[-1], 0)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _stack(self, name: str, values: Sequence[np.ndarray]) -> np.ndarray:
        for row, value in enumerate(values):
            if value.ndim != values[0].ndim or value.shape[:-1] != values[0].shape[:-1]:
                raise ValueError(
                    f"{name!r} has shape {values[0].shape} in the first sample of a batch and {value.shape} in sample "
                    f"{row} (from 0); they may differ in the last dimension only"
                )
        if values[0].ndim == 0:
            return np.stack(values)  # [B]
        longest = max(value.shape[-1] for value in values)
        multiple = 1 if name == "labels" and values[0].dtype.kind == "f" else self.multiple_of
        length = self.lengths.get(name) or -(-longest // multiple) * multiple
        if longest > length:
            raise ValueError(f"a sample has {longest} {name}, more than the fixed length {length}")
        return _pad(
            values, length, {"input_ids": self.pad_token_id, "labels": IGNORED}.get(name, 0)
        )


def with_loss_mask(collate: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """Returns a collate function whose batches have labels of -100 in place of Megatron's `loss_mask` of 0."""

    def collated(samples: Sequence[Any]) -> Any:
        batch = collate(samples)
        if isinstance(batch, dict) and "loss_mask" in batch and "labels" in batch:
            batch["labels"] = batch["labels"].masked_fill(batch.pop("loss_mask") == 0, IGNORED)
        return batch

    return collated


def check_names(samples: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless all samples of a batch have the same names."""
    for row, sample in enumerate(samples):
        for name in samples[0].keys() ^ sample.keys():
            lacking, having = (row, 0) if name in samples[0] else (0, row)
            raise ValueError(
                f"sample {lacking} of a batch (from 0) has no {name!r}, which sample {having} has; give it to all "
                "samples, or to none"
            )


def common_dtype(values: Sequence[np.ndarray]) -> np.dtype:
    """Returns the dtype that holds all arrays. Empty ones are ignored, because numpy makes an empty list float64."""
    return np.result_type(
        *([value.dtype for value in values if value.size] or [value.dtype for value in values])
    )


def _pad(values: Sequence[np.ndarray], length: int, fill: int) -> np.ndarray:
    out = np.full((len(values), *values[0].shape[:-1], length), fill, common_dtype(values))
    for row, value in zip(out, values, strict=True):
        row[..., : value.shape[-1]] = value
    return out


class DefaultCollate:
    """Collates samples. It stacks samples of equal length.

    Samples of unequal lengths are padded on the right (labels with -100), and get an attention mask; so are tokens and
    labels whose length is no multiple of `multiple_of`. Integers become int64, which embeddings and losses need.
    Python's floats become float32.
    """

    def __init__(self, pad_token_id: int, multiple_of: int = 1) -> None:
        self._pad = PadBatch(pad_token_id, multiple_of=multiple_of)

    def __call__(self, samples: Sequence[Any]) -> Batch:
        for sample in samples:
            if not isinstance(sample, Mapping):
                raise ValueError(
                    f"a sample must be a dict of arrays, not a {type(sample).__name__}; pass a collate_fn"
                )
        check_names(samples)
        rows = {
            name: _of_one_dtype([_array(name, sample[name]) for sample in samples])
            for name in samples[0]
        }
        if any(self._pads(name, values) for name, values in rows.items()):
            return self._pad(
                [
                    dict(zip(rows, values, strict=True))
                    for values in zip(*rows.values(), strict=True)
                ]
            )
        return {name: torch.from_numpy(np.stack(values)) for name, values in rows.items()}

    def _pads(self, name: str, values: Sequence[np.ndarray]) -> bool:
        if any(value.shape != values[0].shape for value in values):
            return True
        is_sequence = name == "input_ids" or (
            name == "labels" and values[0].dtype.kind == "i" and values[0].ndim > 0
        )
        return is_sequence and values[0].shape[-1] % self._pad.multiple_of > 0


Batch = dict[str, Tensor]


def _array(name: str, value: Any) -> np.ndarray:
    """Returns a sample's value as an array. Raises ValueError unless it holds numbers."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (
            value.float() if value.dtype == torch.bfloat16 else value
        ).numpy()  # NumPy has no bfloat16
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(
            f"the samples' {name!r} holds lists of unequal lengths: {value!r:.60}; pad them, or pass a collate_fn"
        ) from None
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"the samples' {name!r} must hold numbers, not {value!r:.60}; remove it, or pass a collate_fn"
        )
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    if array.dtype == np.float64 and not isinstance(value, (np.ndarray, np.generic)):
        return array.astype(np.float32)
    return array


def _of_one_dtype(values: list[np.ndarray]) -> list[np.ndarray]:
    dtype = common_dtype(values)
    if dtype == np.float64 and all(value.dtype != dtype for value in values):
        dtype = np.dtype(np.float32)  # the type to which torch promotes integers and float32
    return [value.astype(dtype, copy=False) for value in values]
