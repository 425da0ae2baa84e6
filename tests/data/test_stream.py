"""Streams: every sample exactly once, to one rank and worker, also after stops."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from every_case import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo.data import DocumentRecords, IterableRecords, ResumableStream, Share, iter_documents
from shardzoo.data.text.records import read_chunk

fuzz = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def number_sample(record, generator):
    """The record itself, and a random number that must depend on the sample's place alone."""
    values = np.array([record, generator.integers(1 << 40)])
    return {"input_ids": values, "labels": values}


def stream(rank=0, world=1, batch=1, size=50, epochs=1, **options) -> ResumableStream:
    records = IterableRecords(lambda epoch: range(1000 * epoch, 1000 * epoch + size))
    return ResumableStream(
        records, number_sample, Share(batch, rank, world), epochs=epochs, **options
    )


def rows(batch) -> list[tuple[int, int]]:
    return [tuple(row) for row in batch["labels"].tolist() if row[0] != -100]


def global_steps(streams, count=None) -> list[list[tuple[int, int]]]:
    """Global batches (ranks in order), `count` or all."""
    running = [iter(each) for each in streams]
    found = []
    while count is None or len(found) < count:
        batches = [next(each, None) for each in running]
        if batches[0] is None:
            assert all(batch is None for batch in batches)  # all ranks end together
            break
        found.append([row for batch in batches for row in rows(batch)])
    return found


@fuzz
@given(
    world=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 3),
    size=st.integers(1, 60),
    shuffle=st.sampled_from([0, 1, 7, 100]),
    epochs=st.integers(1, 2),
)
def test_ranks_cover_the_stream_once_and_end_together(world, batch, size, shuffle, epochs):
    for last in ("drop", "pad"):
        options = {"size": size, "shuffle_buffer": shuffle, "epochs": epochs, "last": last}
        steps = global_steps([stream(r, world, batch, **options) for r in range(world)])
        counts = Counter(value for step in steps for value, _ in step)
        total = size * epochs
        kept = total if last == "pad" else total // (batch * world) * (batch * world)
        assert sum(counts.values()) == kept
        assert set(counts.values()) <= {1}
        one = global_steps([stream(0, 1, batch * world, **options)])
        assert steps == one  # the same samples, drawn with the same random numbers, on one rank


@pytest.mark.parametrize("world", [1, 2])
def test_workers_change_nothing(world):
    plain = [stream(r, world, 2, shuffle_buffer=8, last="pad") for r in range(world)]
    workers = [
        stream(r, world, 2, shuffle_buffer=8, last="pad", num_workers=2) for r in range(world)
    ]
    assert global_steps(plain) == global_steps(workers)


@fuzz
@given(
    stop=st.integers(0, 30),
    first=st.sampled_from([1, 2, 4]),
    second=st.sampled_from([1, 2, 4]),
    shuffle=st.sampled_from([0, 1, 5, 16, 1000]),
)
def test_stopping_anywhere_repeats_and_loses_nothing(stop, first, second, shuffle):
    options = {"size": 50, "shuffle_buffer": shuffle, "epochs": 2, "last": "pad"}
    whole = [row for step in global_steps([stream(batch=4, **options)]) for row in step]
    before = [stream(r, first, 4 // first, **options) for r in range(first)]
    seen = [row for step in global_steps(before, stop) for row in step]
    state = json.loads(json.dumps(before[-1].state_dict()))  # a checkpoint can hold it
    after = [stream(r, second, 4 // second, **options) for r in range(second)]
    for each in after:
        each.load_state_dict(state)
    seen += [row for step in global_steps(after) for row in step]
    assert seen == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_the_number_of_samples_is_known_at_the_end(workers):
    """Also after a stop, of both epochs, and with samples that no batch has room for."""
    loader = stream(batch=3, size=10, epochs=2, num_workers=workers)
    batches = iter(loader)
    next(batches)
    position = loader.state_dict()
    assert loader.total is None
    assert len(list(batches)) == 5
    assert loader.total == 20
    resumed = stream(batch=3, size=10, epochs=2, num_workers=workers)
    resumed.load_state_dict(position)
    assert len(list(resumed)) == 5
    assert resumed.total == 20


def test_stopping_under_workers_counts_what_was_handed_out():
    whole = global_steps([stream(batch=3, shuffle_buffer=9)])
    before = stream(batch=3, shuffle_buffer=9, num_workers=2)
    seen = global_steps([before], 5)
    assert before.state_dict()["consumed_samples"] == 15
    after = stream(batch=3, shuffle_buffer=9, num_workers=1)
    after.load_state_dict(before.state_dict())
    assert seen + global_steps([after]) == whole


def test_the_shuffle_moves_samples_and_epochs_differ():
    records = [
        [value for value, _ in step]
        for step in global_steps([stream(batch=50, shuffle_buffer=25, epochs=2)])
    ]
    assert records[0] != sorted(records[0])
    assert sorted(records[0]) == list(range(50))
    assert [value - 1000 for value in records[1]] != records[0]


def test_documents_of_files_stream_in_an_order_per_epoch(jsonl, texts, monkeypatch):
    monkeypatch.setattr("shardzoo.data.text.sources.CHUNK_BYTES", 4096)
    numbers = {text: number for number, text in enumerate(texts)}

    def make(rank=0, world=1, **options):
        records = DocumentRecords(jsonl, seed=3)
        transform = lambda text, generator: number_sample(numbers[text], generator)  # noqa: E731
        return ResumableStream(
            records,
            transform,
            Share(4 // world, rank, world),
            shuffle_buffer=30,
            epochs=2,
            **options,
        )

    whole = global_steps([make()])
    epochs = [
        [value for step in whole[start : start + 50] for value, _ in step] for start in (0, 50)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(200))] * 2
    assert epochs[0] != epochs[1] != sorted(epochs[0])
    for stop in (1, 23, 49, 50, 77):
        first = make()
        seen = global_steps([first], stop)
        after = [make(r, 2) for r in range(2)]
        for each in after:
            each.load_state_dict(first.state_dict())
        assert seen + global_steps(after) == whole


def test_resuming_a_hugging_face_stream():
    import datasets

    made = []

    def make(epoch):
        made.append(
            datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
        )
        return made[-1]

    def sample(record, generator):
        return number_sample(record["x"], generator)

    options = {
        "records": IterableRecords(make),
        "transform": sample,
        "share": Share(4),
        "shuffle_buffer": 8,
    }
    whole = global_steps([ResumableStream(**options)])
    first = ResumableStream(**options)
    seen = global_steps([first], 5)
    after = ResumableStream(**options)
    after.load_state_dict(first.state_dict())
    assert after.state_dict()["bookmark"]["cursor"] == 16
    assert seen + global_steps([after]) == whole
    assert sorted(value for step in whole for value, _ in step) == list(range(40))


def test_resuming_skips_by_the_stream_s_own_means():
    class Skipping(list):
        def skip(self, count):
            skipped.append(count)
            return self[count:]

    skipped = []
    records = IterableRecords(lambda epoch: Skipping(range(10)))
    assert list(records.read(0, 7)) == [(7, 8), (8, 9), (9, 10)]
    assert skipped == [7]


class Drawing(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(40))


def drawn(records) -> dict:
    """A collate function that draws from the generators of its process."""
    values = [random.random(), np.random.rand(), torch.rand(()).item()]
    return {"labels": torch.tensor([[sample["labels"][0], *values] for sample in records])}


def test_what_a_collate_function_draws_in_workers_goes_on():
    def make():
        options = {"epochs": 3, "num_workers": 2, "collate": drawn, "last": "pad"}
        return ResumableStream(
            IterableRecords(lambda epoch: Drawing()), number_sample, Share(3), **options
        )

    whole, first, after = global_steps([make()]), make(), make()
    seen = global_steps([first], 5)
    after.load_state_dict(first.state_dict())
    assert seen + global_steps([after]) == whole
    assert len({row[1:] for step in whole for row in step}) == len(whole) == 40


def test_bad_records_stop_or_are_skipped(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "1"}\n{\n{"text": "2"}\n')
    make = lambda **options: ResumableStream(  # noqa: E731
        DocumentRecords(path, **options), lambda text, g: number_sample(int(text), g), Share(1)
    )
    with pytest.raises(ValueError, match=r"x\.jsonl, record 2: not JSON"):
        global_steps([make()])
    assert [
        value for step in global_steps([make(on_bad=lambda record: None)]) for value, _ in step
    ] == [1, 2]


def test_empty_streams_and_bad_settings_are_named():
    with pytest.raises(ValueError, match="holds no records"):
        global_steps([stream(size=0)])
    with pytest.raises(ValueError, match="cannot be negative"):
        stream(shuffle_buffer=-1)


def test_a_stream_reads_no_further_than_it_must(tmp_path):
    taken = Counter()

    def endless(epoch):
        for number in range(10**12):
            taken["read"] = number
            yield number

    records = ResumableStream(IterableRecords(endless), number_sample, Share(2), shuffle_buffer=64)
    global_steps([records], 100)
    assert taken["read"] < 300


def test_iter_documents_is_lazy(jsonl, monkeypatch):
    monkeypatch.setattr("shardzoo.data.text.sources.CHUNK_BYTES", 4096)
    read = []

    def counted(chunk, text_key):
        read.append(chunk)
        return read_chunk(chunk, text_key)

    monkeypatch.setattr("shardzoo.data.text.documents.read_chunk", counted)
    next(iter(iter_documents(jsonl)))
    assert len(read) == 1
