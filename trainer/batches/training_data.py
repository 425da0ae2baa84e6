"""Makes resumable training batches from a dataset, an iterable or a loader."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any, Protocol

from ...data import EpochShuffle, IterableRecords, ResumableLoader, ResumableStream, Share
from ...data.loading.collate import DataCollator
from ..arguments.training_arguments import TrainingArguments
from ..launch.ranks import Ranks
from .dataset_kinds import check_agreement, check_kind, find_length, is_stream, makes_batches

Collate = Callable[[Sequence[Any]], Any]
SHARED_MEMORY = "/dev/shm"
LEAST_SHARED_MEMORY = 1 << 20  # bytes; batches are small


class Batches(Protocol):
    """Micro-batches of one data-parallel rank.

    `state_dict()` returns the position after the last yielded one.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainingData:
    """The micro-batches of this rank, and the number of steps that they suffice for (None if
    unknown or unlimited).
    """

    batches: Batches
    steps: int | None


def make_training_data(
    dataset: Any,
    arguments: TrainingArguments,
    ranks: Ranks,
    collate: Collate | None,
    pad_token_id: int = 0,
) -> TrainingData:
    """Returns the batches of a map-style dataset, an iterable of samples, or a resumable loader or
    stream of batches.

    A dataset of known length is shuffled in each epoch, or ordered by its `make_order(seed,
    global_batch)`. A dataset without a length is read in order, endlessly.

    Raises ValueError if the dataset is of another kind, is empty, differs between processes, or has
    fewer samples than a global batch, or if `epochs` is set for a dataset without a length.
    """
    share = Share(arguments.micro_batch_size, ranks.dp_rank, ranks.dp_size)
    check_kind(dataset)
    if makes_batches(dataset):
        _check_batches(dataset, share, collate, arguments)
    workers = getattr(dataset, "num_workers", arguments.num_workers)
    check_agreement(dataset, ranks, workers=workers)
    if workers and sys.platform == "linux":
        _check_shared_memory(workers)
    if makes_batches(dataset):
        return TrainingData(dataset, _count_steps(dataset, arguments, ranks))
    collate = collate or DataCollator(pad_token_id, arguments.length_multiple)
    workers = arguments.num_workers
    seed = arguments.seed
    epochs = None if arguments.train_steps else arguments.epochs
    global_batch = arguments.global_batch(ranks.dp_size)
    size = find_length(dataset)
    total = None
    steps = None
    if size is not None:
        check_size(size, global_batch)
        if epochs is not None:
            total = size * epochs
            steps = total // global_batch
    if is_stream(dataset):
        stream = ResumableStream(
            IterableRecords.from_iterable(dataset),
            lambda record, generator: record,
            share,
            epochs=epochs,
            num_workers=workers,
            collate=collate,
        )
        return TrainingData(stream, steps)
    if size is None and epochs is not None:
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__} without a length, so the end of epochs={epochs} is unknown; "
            "set train_steps, or give it a __len__"
        )
    order = None
    if size is not None and hasattr(dataset, "make_order"):
        order = dataset.make_order(seed, global_batch)
    elif size is not None:
        order = EpochShuffle(size, seed)
    loader = ResumableLoader(
        dataset, share, total=total, order=order, collate=collate, num_workers=workers, seed=seed
    )
    return TrainingData(loader, steps)


def _check_shared_memory(workers: int) -> None:
    """Raises ValueError if worker processes could not pass on their batches; torch would end in the
    midst of them.
    """
    try:
        with TemporaryFile(dir=SHARED_MEMORY) as file:
            os.posix_fallocate(file.fileno(), 0, LEAST_SHARED_MEMORY)
    except OSError as error:
        raise ValueError(
            f"num_workers={workers} needs shared memory, but {SHARED_MEMORY} cannot be used: {error.strerror}; "
            "enlarge it (docker run --shm-size=1g), or set num_workers=0"
        ) from None


def check_size(size: int, global_batch: int) -> None:
    if size == 0:
        raise ValueError("train_dataset is empty")
    if size < global_batch:
        raise ValueError(
            f"train_dataset has {size} samples, fewer than the {global_batch} of one optimizer step over all ranks; "
            "use a smaller micro_batch_size, fewer gradient_accumulation_steps or fewer processes"
        )


def _check_batches(
    batches: Any, share: Share, collate: Collate | None, arguments: TrainingArguments
) -> None:
    if collate is not None:
        raise ValueError(
            "train_dataset already yields batches; pass collate_fn to the loader or stream instead"
        )
    other = getattr(batches, "share", share)
    if other != share:
        raise ValueError(
            f"train_dataset was made for {other}, but this rank needs {share}: make it with trainer.share"
        )
    epochs = arguments.epochs
    if not arguments.train_steps and epochs > 1 and getattr(batches, "epochs", 1) != epochs:
        raise ValueError(
            f"train_dataset defines its own number of epochs, which epochs={epochs} cannot change; pass the number to "
            f"the {type(batches).__name__}, and leave epochs at 1 or set train_steps"
        )


def _count_steps(batches: Any, arguments: TrainingArguments, ranks: Ranks) -> int | None:
    total = getattr(batches, "total", None)
    if total is None:
        return None
    return total // arguments.global_batch(ranks.dp_size)
