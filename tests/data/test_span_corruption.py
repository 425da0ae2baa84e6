"""T5's objectives: shares, exact lengths, and that nothing of the text is lost."""

from __future__ import annotations

import os

import numpy as np
import pytest

from shardzoo.data import PrefixLM, SpanCorruption, span_corruption_dataset
from shardzoo.data.objectives.denoising import random_segments

SAMPLES = int(os.environ.get("SHARDZOO_TEST_SAMPLES", "20000"))  # run with 100000 before a release
SENTINELS = tuple(range(999, 899, -1))
CORRUPTION = SpanCorruption(SENTINELS, eos_token_id=1)


def reconstruct(sample: dict[str, np.ndarray]) -> list[int]:
    """Put the target's spans in the place of the input's sentinels."""
    assert sample["input_ids"][-1] == sample["labels"][-1] == 1
    spans: dict[int, list[int]] = {}
    for token in sample["labels"][:-1].tolist():
        if token in SENTINELS:
            spans[token] = current = []
        else:
            current.append(token)
    assert list(spans) == list(SENTINELS[: len(spans)])
    text: list[int] = []
    for token in sample["input_ids"][:-1].tolist():
        text += spans.pop(token) if token in SENTINELS else [token]
    assert not spans
    return text


def test_random_documents_are_corrupted_by_15_percent_and_come_back():
    generator = np.random.default_rng(0)
    corrupted = total = 0
    for number in range(SAMPLES):
        length = int(generator.integers(20, 200))
        tokens = np.arange(2, 2 + length) if number % 50 == 0 else np.zeros(length, np.int64) + 7
        sample = CORRUPTION(tokens, generator)
        assert (len(sample["input_ids"]), len(sample["labels"])) == CORRUPTION.lengths(length)
        _, spans = CORRUPTION.count_spans(length)
        corrupted += len(sample["labels"]) - 1 - spans
        total += length
        if number % 50 == 0:  # all tokens differ
            assert reconstruct(sample) == tokens.tolist()
        elif number % 10 == 0:
            assert len(reconstruct(sample)) == length
    assert corrupted / total == pytest.approx(0.15, abs=0.002)


def test_spans_are_3_tokens_on_average_and_everywhere():
    generator = np.random.default_rng(1)
    hits = np.zeros(100)
    lengths = []
    for _ in range(4000):
        sample = CORRUPTION(np.arange(100) + 2, generator)
        hidden = sample["labels"][:-1]
        sentinel = np.flatnonzero(hidden >= 900)
        lengths.append(np.diff(np.append(sentinel, len(hidden))) - 1)
        hits[hidden[hidden < 900] - 2] += 1
    assert np.concatenate(lengths).mean() == pytest.approx(3.0)
    assert np.concatenate(lengths).min() == 1
    assert hits[0] == 0  # a text begins with kept tokens, as in the published code
    assert hits[10:90].min() > 0.10 * 4000
    assert hits[10:90].max() < 0.20 * 4000


def test_the_published_lengths_are_reproduced():
    # T5: inputs of 512 tokens need 568 raw ones and give targets of 114 (from t5.data's random_spans_helper).
    assert CORRUPTION.raw_length(512) == 568
    assert CORRUPTION.lengths(568) == (512, 114)
    raw = CORRUPTION.raw_length(512, 128)
    assert CORRUPTION.lengths(raw)[0] <= 512
    assert CORRUPTION.lengths(raw)[1] <= 128
    short = CORRUPTION.raw_length(512, 60)
    assert CORRUPTION.lengths(short)[1] <= 60 < CORRUPTION.lengths(short + 3)[1]


def test_given_spans_give_the_papers_example():
    # "Thank you for inviting me to your party last week", Raffel et al. figure 2.
    words = np.array([10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
    sample = CORRUPTION.corrupt(words, np.array([2, 8]), np.array([4, 9]))
    assert sample["input_ids"].tolist() == [10, 11, 999, 14, 15, 16, 17, 998, 19, 1]
    assert sample["labels"].tolist() == [999, 12, 13, 998, 18, 1]


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 2000])
@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.5, 3.0), (0.9, 1.0), (0.01, 10.0)])
def test_odd_lengths_and_densities(length, density, mean):
    corruption = SpanCorruption(tuple(range(9999, 5999, -1)), 1, density, mean)
    tokens = np.arange(2, 2 + length)
    sample = corruption(tokens, np.random.default_rng(length))
    assert len(sample["input_ids"]) == corruption.lengths(length)[0]
    spans: dict[int, list[int]] = {}
    for token in sample["labels"][:-1].tolist():
        if token > 5999:
            spans[token] = current = []
        else:
            current.append(token)
    assert min(map(len, spans.values())) >= 1
    text = [t for token in sample["input_ids"][:-1].tolist() for t in spans.get(token, [token])]
    assert text == tokens.tolist()


def test_impossible_texts_and_settings_are_named():
    generator = np.random.default_rng(0)
    with pytest.raises(ValueError, match="at least 2 tokens, not 1"):
        CORRUPTION(np.array([5]), generator)
    with pytest.raises(ValueError, match="only 100 sentinels"):
        CORRUPTION(np.arange(3000), generator)
    with pytest.raises(ValueError, match=r"noise_density is 1\.5"):
        SpanCorruption(SENTINELS, 1, 1.5)
    with pytest.raises(ValueError, match=r"mean_span_length is 0\.5"):
        SpanCorruption(SENTINELS, 1, 0.15, 0.5)
    with pytest.raises(ValueError, match="no text fits"):
        CORRUPTION.raw_length(2, 2)


def test_every_way_to_cut_is_equally_likely():
    generator = np.random.default_rng(0)
    ways = [tuple(random_segments(6, 3, generator)) for _ in range(20_000)]
    counts = {way: ways.count(way) for way in set(ways)}
    assert len(counts) == 10  # C(5, 2)
    assert max(abs(count / 20_000 - 0.1) for count in counts.values()) < 0.01


def test_datasets_have_fixed_lengths_and_depend_on_seed_and_number_alone(write_dataset):
    indexed = write_dataset([list(range(2, 600)), list(range(2, 400))])
    dataset = span_corruption_dataset(indexed, CORRUPTION, 128, 40, seed=3)
    first = [dataset[i] for i in range(20)]
    assert {len(sample["input_ids"]) for sample in first} == {
        CORRUPTION.lengths(dataset.packed.length)[0]
    }
    again = span_corruption_dataset(indexed, CORRUPTION, 128, 40, seed=3)
    assert again[13]["labels"].tolist() == first[13]["labels"].tolist()
    assert first[0]["labels"].tolist() != first[1]["labels"].tolist()


def test_prefix_lm_splits_anywhere():
    generator = np.random.default_rng(0)
    tokens = np.arange(10, 20)
    borders = set()
    for _ in range(300):
        sample = PrefixLM(1)(tokens, generator)
        assert [*sample["input_ids"][:-1], *sample["labels"][:-1]] == tokens.tolist()
        assert sample["input_ids"][-1] == sample["labels"][-1] == 1
        borders.add(len(sample["input_ids"]) - 1)
        one = PrefixLM(1, decoder_only=True)(tokens, generator)
        border = int(one["prefix_length"])
        assert one["input_ids"].tolist() == tokens.tolist()
        assert one["labels"].tolist() == [-100] * border + tokens[border:].tolist()
    assert borders == set(range(1, 10))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        PrefixLM(1)(tokens[:1], generator)
