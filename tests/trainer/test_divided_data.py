"""Data that a user has divided by rank is refused on every process; what is the same everywhere is trained on once."""

from __future__ import annotations

import os
import random
import re
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from torch import distributed
from torch.utils.data import IterableDataset, Subset, get_worker_info
from training import Pairs

TEXTS = 37


class DistributedIterableDataset(IterableDataset):
    """The class of a published T5x recipe: it divides a stream by the rank that its constructor is given."""

    def __init__(self, dataset, rank, world_size):
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size

    def __iter__(self):
        worker_info = get_worker_info()
        mod = self.world_size
        shift = self.rank
        if worker_info:
            mod *= worker_info.num_workers
            shift = self.rank * worker_info.num_workers + worker_info.id
        for ind, data in enumerate(self.dataset, 1):
            if (ind + shift) % mod == 0:
                yield data


class Plain(IterableDataset):
    def __iter__(self):
        return ({"input_ids": [number]} for number in range(TEXTS))


class OfGroup(IterableDataset):
    def __iter__(self):
        rank, world = distributed.get_rank(), distributed.get_world_size()
        return ({"input_ids": [number]} for number in range(rank, TEXTS, world))


class OfEnvironment(IterableDataset):
    def __iter__(self):
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return ({"input_ids": [number]} for number in range(rank, TEXTS, world))


class Shuffled(IterableDataset):
    """Shuffles by the global generator, which differs between replicas."""

    def __iter__(self):
        return ({"input_ids": [number]} for number in random.sample(range(TEXTS), TEXTS))


class Once(IterableDataset):
    def __init__(self):
        self.rest = iter(Plain())

    def __iter__(self):
        return self.rest


class Fails(IterableDataset):
    def __iter__(self):
        if distributed.get_rank() == 1:
            raise OSError("no such host")
        return iter(Plain())


class Own:
    """A map-style dataset whose samples are random by themselves."""

    def __init__(self, seed=None):
        self.seed = seed

    def __len__(self):
        return TEXTS

    def __getitem__(self, index):
        generator = np.random.default_rng(self.seed)
        return {"input_ids": [index], "noise": [float(generator.random())]}


class Odd:
    """A map-style dataset whose samples hold what NumPy has no arrays for."""

    def __len__(self):
        return TEXTS

    def __getitem__(self, index):
        eye = torch.eye(2)
        record = np.array([(index, object())], [("number", "i4"), ("object", object)])
        odd = [
            eye.to_sparse(),
            torch.nested.nested_tensor([eye, eye[0:1]]),
            eye.to("meta"),
            eye.to(torch.bfloat16),
        ]
        odd += [
            torch.ones(2, dtype=torch.complex64).conj().imag,
            {"nan": float("nan"), "none": None},
            record,
        ]
        return {"input_ids": [index], "odd": odd}


class WithoutLength:
    def __getitem__(self, index):
        return {"input_ids": [list(range(TEXTS))[index]]}


class Drawn(Own):
    """Random by global generators."""

    def __getitem__(self, index):
        return {
            "input_ids": [index],
            "noise": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        }


def hub(size=TEXTS, shards=2):
    return datasets.Dataset.from_list(
        [{"input_ids": [i]} for i in range(size)]
    ).to_iterable_dataset(num_shards=shards)


def read(mesh, make, workers=0):
    """The ids that this process trains on, or the error, and whether the generators are as before."""
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.batches.training_data import make_training_data
    from shardzoo.trainer.launch.ranks import Ranks

    os.environ |= {"RANK": str(mesh.rank), "WORLD_SIZE": str(mesh.world_size)}
    arguments = TrainingArguments(micro_batch_size=1, epochs=1, num_workers=workers)
    random.seed(mesh.dp_rank)
    torch.manual_seed(mesh.dp_rank)
    before = random.getstate(), torch.get_rng_state().tolist()
    try:
        data = make_training_data(make(mesh), arguments, Ranks(mesh), None)
    except ValueError as error:
        return str(error)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    return [number for batch in data.batches for number in batch["input_ids"].flatten().tolist()]


def divided(mesh):
    return DistributedIterableDataset(list(Plain()), mesh.dp_rank, mesh.dp_size)


def by_node(mesh):
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(hub(), mesh.dp_rank, mesh.dp_size)


def equal_records(mesh):
    """Divided too, but the first records are all the same."""
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_list([{"input_ids": [7]}] * 20).to_iterable_dataset(num_shards=2)
    return split_dataset_by_node(rows, mesh.dp_rank, mesh.dp_size)


def stream_of_parts(mesh):
    from shardzoo.data import IterableRecords, ResumableStream, Share

    records = IterableRecords(lambda epoch: divided(mesh))
    return ResumableStream(
        records, lambda record, generator: record, Share(1, mesh.dp_rank, mesh.dp_size)
    )


def loader_of_parts(mesh):
    from shardzoo.data import ResumableLoader, Share

    rows = list(Plain())[mesh.dp_rank :: mesh.dp_size]
    return ResumableLoader(rows, Share(1, mesh.dp_rank, mesh.dp_size), total=len(rows))


def loader_of_positions(mesh):
    """There are more positions than samples."""
    from shardzoo.data import EpochShuffle, ResumableLoader, Share

    share = Share(1, mesh.dp_rank, mesh.dp_size)
    return ResumableLoader(WithoutLength(), share, total=3 * TEXTS, order=EpochShuffle(TEXTS))


def odd_digest(mesh):
    from shardzoo.trainer.batches.dataset_kinds import check_agreement
    from shardzoo.trainer.launch.ranks import Ranks

    check_agreement(Odd(), Ranks(mesh))


REFUSED = {
    "constructor": (divided, "is not the same on process 0 and process 1;"),
    "group": (lambda mesh: OfGroup(), "is not the same on process 0 and process 1;"),
    "environment": (lambda mesh: OfEnvironment(), "is not the same on process 0 and process 1;"),
    "split_dataset_by_node": (by_node, r"was divided into \d parts by split_dataset_by_node"),
    "equal records": (equal_records, r"was divided into \d parts by split_dataset_by_node"),
    "own stream": (stream_of_parts, "is not the same on process 0 and process 1;"),
    "own loader": (loader_of_parts, "is not the same on process 0"),
    "list": (
        lambda mesh: list(Plain())[mesh.rank :: mesh.world_size],
        "is not the same on process 0",
    ),
    "lengths": (
        lambda mesh: list(Plain())[: TEXTS - mesh.rank],
        r"process 1 \(of 37 and 36 samples\)",
    ),
    "random lengths": (
        lambda mesh: Subset(Own(), range(TEXTS - mesh.rank)),
        r"process 1 \(of 37 and 36 samples\)",
    ),
    "samples": (
        lambda mesh: Pairs(64, vocab_size=60 + mesh.rank),
        "is not the same on process 0 and process 1;",
    ),
    "one empty": (
        lambda mesh: [] if mesh.rank else list(Plain()),
        r"process 1 \(of 37 and 0 samples\)",
    ),
    "shuffled": (lambda mesh: Shuffled(), "gave other records when it was read again"),
    "once": (lambda mesh: Once(), "gave other records when it was read again"),
    "unseeded": (
        lambda mesh: hub().shuffle(seed=None, buffer_size=20),
        "is not the same on process 0",
    ),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", REFUSED)
def test_divided_data_is_refused_on_every_process(run_mesh, case, ranks):
    make, message = REFUSED[case]
    found = run_mesh(1, read, make, data=ranks)
    assert len(set(found)) == 1, "every process says the same"
    assert isinstance(found[0], str)
    assert re.match("train_dataset .*" + message, found[0]), found[0]


def test_the_message_says_what_to_do(run_mesh):
    assert "the trainer gives each process its part" in run_mesh(1, read, divided, data=2)[0]


def test_the_parts_of_one_model_see_the_same(run_mesh):
    found = run_mesh(2, read, lambda mesh: OfGroup())
    assert found[0] == found[1]
    assert "is not the same on process 0 and process 1" in found[0]
    for found in run_mesh(2, read, lambda mesh: Own()):
        assert found.startswith(
            "train_dataset gave other samples when they were read again, and others on each"
        )
    assert len(run_mesh(2, read, lambda mesh: Drawn())[0]) == TEXTS


def test_a_process_that_cannot_read_is_named_by_all(run_mesh):
    def reads(mesh):
        try:
            return read(mesh, lambda mesh: Fails())
        except OSError as error:
            return error.args[0]

    found = run_mesh(1, reads, data=2)
    assert found == [
        "train_dataset cannot be read on process 1: OSError: no such host",
        "no such host",
    ]


ACCEPTED = {
    "stream": lambda mesh: Plain(),
    "hub": lambda mesh: hub(),
    "divided into one": lambda mesh: DistributedIterableDataset(list(Plain()), 0, 1),
    "seeded": lambda mesh: hub().shuffle(seed=5, buffer_size=20),
    "list": lambda mesh: list(Plain()),
    "random samples": lambda mesh: Own(),
    "augmented": lambda mesh: Drawn(),
    "tiny": lambda mesh: list(Plain())[:3],
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ACCEPTED)
def test_undivided_data_is_trained_on_exactly_once(run_mesh, case, ranks):
    found = run_mesh(1, read, ACCEPTED[case], data=ranks)
    counts = Counter(number for part in found for number in part)
    size = 3 if case == "tiny" else TEXTS
    assert set(counts.values()) == {1}
    assert len(counts) == size // ranks * ranks  # the incomplete last batch is left out
    assert set(counts) <= set(range(size))


def test_samples_of_any_content_are_compared(run_mesh):
    run_mesh(2, odd_digest)


def test_a_loader_is_asked_for_numbers_of_its_order(run_mesh):
    found = run_mesh(1, read, loader_of_positions, data=2)
    counts = Counter(number for part in found for number in part)
    assert sorted(counts.values()) == [2] + [3] * (
        TEXTS - 1
    )  # of 111 positions, the incomplete last batch is left out


def test_workers_need_a_stream_that_can_be_read_again(run_mesh):
    assert "gave other records" in run_mesh(1, read, lambda mesh: Once(), 2)[0]
    assert "gave other records" in run_mesh(1, read, lambda mesh: Shuffled(), 2)[0]
    assert sorted(run_mesh(1, read, lambda mesh: Once())[0]) == list(
        range(TEXTS)
    )  # the only reader


def test_validation_data_is_compared_too(run_mesh, tmp_path):
    from training import run_training

    def trains(mesh):
        with pytest.raises(
            ValueError, match="valid_dataset is not the same on process 0 and process 1"
        ):
            run_training(
                mesh, tmp_path, env_type="pytorchDDP", valid=Pairs(8, vocab_size=50 + mesh.rank)
            )

    run_mesh(1, trains, data=2)
