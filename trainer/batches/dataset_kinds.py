"""Tells the kinds of datasets apart, and checks that all processes were given the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...data import IterableRecords, ResumableLoader
from ..checkpointing.random_state import random_state_tensors, restore_random_state, seed_everything
from ..launch.ranks import Ranks

COMPARED = 4  # records of a stream
Reading = tuple[int | None, str]  # the number of samples, if it is known, and a digest of some
UNDIVIDED = (
    "pass the same, undivided data on every process (no rank and world_size, split_dataset_by_node or "
    "DistributedSampler; a fixed seed if it is shuffled): the trainer gives each process its part"
)
OWN_RANDOMNESS = (
    "gave other samples when they were read again, and others on each process, but the parts of one model need the "
    "same; use the global generators of random, numpy or torch for random changes of samples, which are seeded alike"
)


def check_kind(dataset: Any) -> None:
    """Raises ValueError for an object that is not a dataset, or can be read only once."""
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__}, which can be read only once; pass an object whose __iter__ "
            "starts again, such as datasets.IterableDataset.from_generator(function)"
        )
    if isinstance(dataset, DataLoader) and not hasattr(dataset, "load_state_dict"):
        raise ValueError(
            "train_dataset is a DataLoader, which cannot resume where a run was stopped; pass its dataset as "
            "train_dataset, and its collate_fn as collate_fn"
        )
    readable = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    other = isinstance(dataset, (type, str, bytes, Mapping)) or is_table(dataset)
    if other or not readable:
        kind = f"a {type(dataset).__name__}"
        if isinstance(dataset, type):
            kind = f"the class {dataset.__name__}"
        raise ValueError(
            f"train_dataset is {kind}; use a dataset with __getitem__, an iterable of samples, or a resumable loader "
            "or stream of batches"
        )


def makes_batches(dataset: Any) -> bool:
    """Returns whether this is a resumable loader or stream of batches, rather than samples."""
    return hasattr(dataset, "load_state_dict") and not hasattr(dataset, "__getitem__")


def is_stream(dataset: Any) -> bool:
    """Returns whether samples can be read in order only."""
    # torch's IterableDataset, the base class of Hugging Face's, has a __getitem__ that only raises.
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__")


def find_length(dataset: Any) -> int | None:
    """Returns the number of samples of a dataset, or None if it does not know it."""
    if not hasattr(dataset, "__len__"):
        return None
    try:
        return len(dataset)
    except TypeError:  # torch's ChainDataset over streams has a __len__, but no length
        return None


def check_agreement(
    dataset: Any, ranks: Ranks, *, name: str = "train_dataset", workers: int = 0
) -> None:
    """Raises ValueError on every process if their data differs, or a stream that several read is
    not repeatable.

    Every process reads a whole stream and keeps its part, so the first records must be equal. Of a
    map-style dataset the length and three samples are compared. The global random generators are
    left as they were.

    Args:
        workers: processes that read the data for each rank.
    """
    opaque = (
        makes_batches(dataset)
        and not hasattr(dataset, "peek")
        and not isinstance(dataset, ResumableLoader)
    )
    if opaque or max(1, workers) * ranks.world_size == 1:
        return
    streams = hasattr(dataset, "peek") or (
        is_stream(dataset) and not isinstance(dataset, ResumableLoader)
    )
    # Randomness from the global generators must not change the order of a stream. Samples of a
    # map-style dataset may depend on it, so that they are compared under the same seed.
    state = random_state_tensors()
    readings: list[Reading] | str
    failure: Exception | None = None
    try:
        if streams:
            readings = [_read_stream(dataset, seed) for seed in (0, 1)]
        else:
            readings = [_read_samples(dataset, seed) for seed in (0, 0)]
    except Exception as error:  # the other processes wait for this one
        failure = error
        readings = f"{type(error).__name__}: {error}"
    finally:
        restore_random_state(state)
    divided = getattr(dataset, "_distributed", None)  # of split_dataset_by_node
    found = ranks.gather((readings, getattr(divided, "world_size", 1)))
    if failure is not None:
        raise failure
    problem = _disagreement(found, streams, one_model=ranks.dp_size < ranks.world_size)
    if problem:
        raise ValueError(f"{name} {problem}")


def _disagreement(found: list[tuple[Any, int]], streams: bool, *, one_model: bool) -> str | None:
    """Returns what is wrong with (readings or an error, parts) of all processes, or None."""
    for process, (readings, parts) in enumerate(found):
        if isinstance(readings, str):
            return f"cannot be read on process {process}: {readings}"
        if parts > 1 and len(found) > 1:
            return f"was divided into {parts} parts by split_dataset_by_node; {UNDIVIDED}"
    random = any(first != second for (first, second), _ in found)
    if random and streams:
        return (
            "gave other records when it was read again, but several processes read it; it must give the same records "
            "in each epoch's __iter__, so its randomness may depend on the epoch alone (set_epoch); random changes of "
            "samples belong into collate_fn"
        )
    first = found[0][0][0]
    other = next(
        (process for process, (readings, _) in enumerate(found) if readings[0] != first), None
    )
    if other is None:
        return None
    length = first[0]
    other_length = found[other][0][0][0]
    if length != other_length:
        sizes = f"of {length} and {other_length} samples"
        return f"is not the same on process 0 and process {other} ({sizes}); {UNDIVIDED}"
    if not random:
        return f"is not the same on process 0 and process {other}; {UNDIVIDED}"
    # Replicas may draw different random changes of a sample, but the parts of one model need the
    # same.
    return OWN_RANDOMNESS if one_model else None


def _read_stream(dataset: Any, seed: int) -> Reading:
    """Returns None and a digest of the first records of a stream, read under a seed of the global
    generators.
    """
    seed_everything(seed)
    if hasattr(dataset, "peek"):
        return None, _digest(dataset.peek(COMPARED))
    records = IterableRecords.from_iterable(dataset).read(0, None)
    return None, _digest([record for record, _ in islice(records, COMPARED)])


def _read_samples(dataset: Any, seed: int) -> Reading:
    """Returns the length of a map-style dataset, and a digest of its first, middle and last sample."""
    seed_everything(seed)
    total = None
    order = None
    if isinstance(dataset, ResumableLoader):
        total = dataset.total
        order = dataset.order
        dataset = dataset.dataset
    size = find_length(dataset)
    if size is None and order:  # the numbers of the samples are known to the order alone
        return total, _digest(dataset[order(0)])
    if size is None:
        size = total
    numbers = {0}
    if size is not None:
        numbers = {0, size // 2, size - 1} if size else set[int]()
    return size, _digest([dataset[number] for number in sorted(numbers)])


def _digest(value: Any) -> str:
    """Returns a hash of numbers and texts in nested containers.

    Of other objects only the type counts.
    """
    found = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        value = _as_array(value)
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        yield f"array {value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield f"map {len(value)}".encode()
        for name in sorted(value, key=str):
            yield repr(name).encode()
            yield from _parts(value[name])
    elif isinstance(value, (list, tuple)):
        yield f"list {len(value)}".encode()
        for entry in value:
            yield from _parts(entry)
    elif value is None or isinstance(value, (str, bytes, bool, int, float)):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()


def _as_array(tensor: Tensor) -> np.ndarray | Tensor:
    """Returns the tensor itself if NumPy has no such arrays: a sparse, nested, quantized or meta
    tensor.
    """
    try:
        values = tensor.detach().cpu().resolve_conj().resolve_neg()
        if values.is_floating_point():
            values = values.float()
        return values.numpy()
    except (TypeError, RuntimeError):
        return tensor


def is_table(value: Any) -> bool:
    """Returns whether `value` is a data frame, whose length counts rows but whose items are
    columns.
    """
    return type(value).__module__.split(".")[0] in ("pandas", "polars", "pyarrow")
