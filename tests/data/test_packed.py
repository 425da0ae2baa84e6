"""Packing: every token once per epoch, Megatron's sample index, C++ equal to numpy."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from every_case import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo.data import GPTDataset
from shardzoo.data.indexed import index_building
from shardzoo.data.objectives.packed import PackedTokens

fuzz = settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def distinct_documents(lengths: list[int]) -> list[list[int]]:
    """Documents of which every token is different."""
    ends = np.cumsum(lengths)
    return [list(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]


@settings(fuzz, max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    length=st.integers(2, 14),
    seed=st.integers(0, 99),
)
def test_every_token_is_predicted_once_per_epoch(lengths, length, seed, write_dataset):
    dataset = GPTDataset(write_dataset(distinct_documents(lengths)), length, seed)
    total = sum(lengths)
    epochs = 3 * (length - 1)  # after which samples and epochs end together
    counts = Counter()
    for number in range(epochs * total // (length - 1)):
        sample = dataset[number]
        assert sample["input_ids"].tolist() == sample["labels"].tolist()
        counts.update(sample["labels"][1:].tolist())
    # The very first token has no predecessor; the one behind the last sample takes its place.
    assert set(counts) == set(range(total))
    assert sum(abs(count - epochs) for count in counts.values()) in (0, 2)


@fuzz
@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=10), seed=st.integers(0, 99))
def test_samples_are_documents_end_to_end(lengths, seed, write_dataset):
    documents = distinct_documents(lengths)
    packed = PackedTokens(write_dataset(documents), 3, seed=seed)
    samples = [packed.tokens(i) for i in range(int(packed.samples_per_epoch))]
    followers = {a: b for document in documents for a, b in pairwise(document)}
    firsts = {document[0] for document in documents}
    for sample in samples:
        for a, b in pairwise(sample):
            assert b == followers[a] if a in followers else b in firsts


def test_epochs_and_seeds_have_their_own_order_and_samples_none(write_dataset):
    indexed = write_dataset(distinct_documents([5] * 40))
    dataset = PackedTokens(indexed, 10, seed=1)
    epochs = [[dataset.tokens(20 * e + i).tolist() for i in range(20)] for e in range(3)]
    assert all(sorted(sum(epoch, [])) == list(range(200)) for epoch in epochs)  # noqa: RUF017
    assert epochs[0] != epochs[1] != epochs[2]
    assert PackedTokens(indexed, 10, seed=2).tokens(0).tolist() != epochs[0][0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert [copy.tokens(i).tolist() for i in (59, 3, 21)] == [
        dataset.tokens(i).tolist() for i in (59, 3, 21)
    ]


def test_gpt_samples_survive_pickling(write_dataset):
    dataset = GPTDataset(write_dataset(distinct_documents([5] * 40)), 8, seed=1)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[31]["input_ids"].tolist() == dataset[31]["input_ids"].tolist()


@pytest.mark.parametrize("length", [0, 1])
def test_impossible_lengths_are_named(length, write_dataset):
    with pytest.raises(ValueError, match=f"sequence_length is {length}"):
        GPTDataset(write_dataset([[1, 2]]), length)
    with pytest.raises(ValueError, match="holds no tokens"):
        GPTDataset(write_dataset([[]]), 4)
    with pytest.raises(IndexError, match="no end"):
        GPTDataset(write_dataset([[1, 2]]), 4)[-1]


@fuzz
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    sequence=st.integers(1, 12),
    seed=st.integers(0, 9),
)
def test_sample_index_is_megatrons(lengths, sequence, seed):
    from megatron.core.datasets import helpers_cpp

    sizes = np.array(lengths, np.int32)
    order = np.random.default_rng(seed).permutation(len(sizes)).astype(np.int32)
    theirs = helpers_cpp.build_sample_idx_int32(
        sizes, order, sequence, 1, int(sizes.sum()), True, 1
    )
    count = (sum(lengths) - 1) // sequence
    ours = index_building.reference_sample_index(sizes[order].astype(np.int64), 0, sequence, count)
    assert ours.tolist() == theirs[:count].tolist()


needs_compiled = pytest.mark.skipif(
    not index_building.is_compiled, reason="no compiled index builders"
)


@needs_compiled
@fuzz
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any),
    first=st.integers(0, 40),
    stride=st.integers(1, 20),
)
def test_compiled_sample_index_equals_numpy(lengths, first, stride):
    sizes = np.array(lengths, np.int64)
    count = max(0, -(-(int(sizes.sum()) - first) // stride))
    expected = index_building.reference_sample_index(sizes, first, stride, count)
    assert np.array_equal(
        index_building.compiled_sample_index(sizes, first, stride, count), expected
    )
    for sample_index in (
        index_building.compiled_sample_index,
        index_building.reference_sample_index,
    ):
        with pytest.raises(ValueError, match="the last document"):
            sample_index(sizes, first, stride, count + 40)


@needs_compiled
@fuzz
@given(
    documents=st.lists(st.lists(st.integers(0, 12), max_size=12), min_size=1, max_size=8),
    length=st.integers(2, 30),
    short=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    least=st.integers(1, 3),
    seed=st.integers(0, 2**64 - 1),
)
def test_compiled_sentence_index_equals_numpy(documents, length, short, least, seed):
    sizes = np.array([size for document in documents for size in document], np.int32)
    marks = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    ours = index_building.reference_sentence_index(sizes, marks, length, short, least, seed)
    assert np.array_equal(
        index_building.compiled_sentence_index(sizes, marks, length, short, least, seed), ours
    )
    taken = [sentence for first, last, _ in ours for sentence in range(first, last)]
    assert len(taken) == len(set(taken))
    for first, last, wished in ours:
        assert last - first >= least
        assert 2 <= wished <= length
        assert np.searchsorted(marks, first, "right") == np.searchsorted(marks, last - 1, "right")
    kept = sum(len(d) for d in documents if len(d) >= least)
    assert all(sizes[list(set(range(len(sizes))) - set(taken))] == 0) or len(taken) <= kept


@needs_compiled
def test_compiled_builders_refuse_arrays_they_cannot_read():
    from shardzoo.data import _index

    lengths = np.arange(10, dtype=np.int64)
    sizes = np.arange(10, dtype=np.int32)
    marks = np.array([0, 4, 10])
    for wrong in (sizes, lengths[::2], lengths.reshape(2, 5), lengths.astype(">i8")):
        with pytest.raises(ValueError, match="lengths must be a contiguous array"):
            _index.sample_index(wrong, 0, 1, 1)
        with pytest.raises(ValueError, match="marks must be a contiguous array"):
            _index.sentence_index(sizes, wrong, 5, 0.1, 1, 0)
    with pytest.raises(ValueError, match="sizes must be a contiguous array"):
        _index.sentence_index(lengths, marks, 5, 0.1, 1, 0)
    for wrong in ([], [-1, 10], [0, 11], [4, 0, 10], [0, 12, 10]):
        with pytest.raises(ValueError, match="document marks out of order"):
            _index.sentence_index(sizes, np.array(wrong, np.int64), 5, 0.1, 1, 0)
    with pytest.raises(ValueError, match="max_length must be at least 2"):
        _index.sentence_index(sizes, marks, 1, 0.1, 1, 0)
    for wrong in ((-1, 1, 1), (0, 0, 1), (0, 1, -1)):
        with pytest.raises(ValueError, match="stride at least 1"):
            _index.sample_index(lengths, *wrong)
    for builder in (_index.sample_index, _index.sentence_index):
        assert "Returns:" in (builder.__doc__ or "")


def test_random_numbers_are_splitmix64():
    # Reference values of the published generator for seed 1234567.
    assert [index_building.draw(1234567, n) for n in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
