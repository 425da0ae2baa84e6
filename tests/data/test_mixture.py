"""Mixtures: shares over any window, samples neither lost nor repeated, and the command line's `wiki:0.7 code:0.3`."""

from __future__ import annotations

import pickle
from collections import Counter
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from every_case import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from shardzoo.data import MixedSamples, ResumableLoader, Share, parse_mixture

WINDOW = 10_000


class Component:
    """Each epoch has the samples k · 10⁶ + i of component k in another order."""

    def __init__(self, number: int, samples: float = 100.0) -> None:
        self.number, self.samples_per_epoch, self.tokens_per_epoch = (
            number,
            samples,
            int(8 * samples),
        )

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, place = divmod(index, int(self.samples_per_epoch))
        order = np.random.default_rng([self.number, epoch]).permutation(int(self.samples_per_epoch))
        value = np.array([self.number * 1_000_000 + order[place]])
        return {"input_ids": value, "labels": value}


def mixture(*shares: float) -> MixedSamples:
    return MixedSamples([Component(number) for number in range(len(shares))], shares)


MIXTURES = [
    (0.7, 0.3), (7, 3), (1, 1, 1), (0.5, 0.25, 0.125, 0.125), (1, 2, 3, 4, 5, 6, 7), (0.99, 0.01), (1e-3, 1),
    (0.9, *[1 / 90] * 9), (1, *[0.01] * 30), (0.123457, 3.14159, 2.71828), (1, 1, 2, 3, 5, 8, 13, 21),
]  # fmt: skip


@pytest.mark.parametrize("shares", MIXTURES, ids=str)
def test_shares_over_every_window_of_ten_thousand(shares):
    mixed = mixture(*shares)
    owners = np.array([mixed.locate(n)[0] for n in range(2 * WINDOW + 77)])
    for number, share in enumerate(shares):
        taken = np.append(0, np.cumsum(owners == number))
        windows = taken[WINDOW:] - taken[:-WINDOW]  # every window, sliding by one sample
        assert abs(windows / WINDOW - share / sum(shares)).max() <= min(0.01, 4 / WINDOW)
        expected = np.arange(len(taken)) * share / sum(shares)
        assert abs(taken - expected).max() < (0.5001 if len(shares) == 2 else 1.7)


@settings(max_examples=examples(40), deadline=None)
@given(shares=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), first=st.integers(0, 10**12))
def test_any_shares_anywhere_in_a_run(shares, first):
    mixed = mixture(*shares)
    places = [mixed.locate(n) for n in range(first, first + 500)]
    before, after = mixed.count_samples(first), mixed.count_samples(first + 500)
    assert (sum(before), sum(after)) == (first, first + 500)
    exact = [Fraction(str(share)) for share in shares]
    for number, share in enumerate(exact):
        own = [index for owner, index in places if owner == number]
        assert own == list(range(before[number], after[number]))  # in order, without gaps
        assert abs(before[number] - first * share / sum(exact)) < 1.7


def test_equal_shares_take_turns_and_a_single_dataset_is_itself():
    assert [mixture(1, 1).locate(n) for n in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [mixture(3).locate(n) for n in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert [mixture(0.7, 0.3).locate(n) for n in range(50)] == [
        mixture(7, 3).locate(n) for n in range(50)
    ]
    copy = pickle.loads(pickle.dumps(mixture(0.7, 0.2, 0.1)))
    assert [copy[n]["labels"][0] for n in range(99)] == [
        mixture(0.7, 0.2, 0.1)[n]["labels"][0] for n in range(99)
    ]


@pytest.mark.parametrize(
    ("first", "second", "workers"), [(1, 2, 0), (2, 4, 0), (4, 1, 2), (2, 3, 0)]
)
def test_a_run_resumed_in_mid_epoch_with_other_ranks_repeats_and_skips_nothing(
    first, second, workers
):
    def loaders(ranks: int) -> list[ResumableLoader]:
        mixed = mixture(0.5, 0.3, 0.2)
        return [
            ResumableLoader(mixed, Share(12 // ranks, rank, ranks), num_workers=workers)
            for rank in range(ranks)
        ]

    def labels(batches) -> list[int]:
        return [int(row[0]) for batch in batches for row in batch["labels"]]

    whole = labels(islice(loaders(1)[0], 20))  # 240 samples: the first corpus has 100 in an epoch
    started = loaders(first)
    seen = [labels(step) for step in islice(zip(*started, strict=True), 7)]
    resumed = loaders(second)
    for loader in resumed:
        loader.load_state_dict(started[0].state_dict())
    seen += [labels(step) for step in islice(zip(*resumed, strict=True), 13)]
    assert [sample for step in seen for sample in step] == whole
    taken = Counter(sample // 1_000_000 for sample in whole)
    assert taken == {0: 120, 1: 72, 2: 48}
    assert Counter(Counter(whole).values()) == {
        1: 200,
        2: 20,
    }  # the first corpus alone began a second epoch


def test_the_figures_of_an_epoch():
    mixed = MixedSamples([Component(0, 70.5), Component(1, 60.0)], (0.7, 0.3))
    assert (mixed.samples_per_epoch, mixed.tokens_per_epoch) == (130.5, 564 + 480)
    assert mixed.count_samples(100) == [70, 30]
    assert mixed.epochs(100) == [70 / 70.5, 0.5]


@pytest.mark.parametrize("shares", [(1 / 3, 2 / 3), (1e-9, 1)])
def test_numbers_of_samples_may_be_numpy_s(shares):
    mixed = mixture(*shares)
    for number in (7, 10**6 + 1, 2**53 + 1, 2**62):
        assert mixed.locate(np.int64(number)) == mixed.locate(number)


@pytest.mark.parametrize(
    "shares",
    [
        (0, 1),
        (-1, 2),
        (float("nan"), 1),
        (float("inf"), 1),
        (None, 1),
        (True, 1),
        ("x", 1),
        ("", 1),
    ],
)
def test_a_share_that_is_none_is_refused(shares):
    with pytest.raises(
        ValueError, match=f"the share of dataset 0 is {shares[0]}; a share must be a positive"
    ):
        mixture(*shares)
    for bad in ([], [1.0, 2.0]):
        with pytest.raises(ValueError, match="each dataset needs a share"):
            MixedSamples([Component(0)], bad)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([], [(None, 1)]),
        (["wiki"], [("wiki", 1)]),
        (["a", "b.jsonl"], [(["a", "b.jsonl"], 1)]),
        (["wiki:0.7", "code:0.3"], [("wiki", Fraction(7, 10)), ("code", Fraction(3, 10))]),
        (["wiki:7", "code:3e0"], [("wiki", 7), ("code", 3)]),
        (["wiki:1"], [("wiki", 1)]),
        (["hf://user/name:main"], [("hf://user/name:main", 1)]),
        (
            ["C:/data/wiki:0.5", "a:b:.5"],
            [("C:/data/wiki", Fraction(1, 2)), ("a:b", Fraction(1, 2))],
        ),
        ([":0.5"], [(":0.5", 1)]),
    ],
)
def test_what_the_command_line_means(sources, expected):
    assert parse_mixture(sources) == expected


def test_a_name_that_exists_has_no_share(tmp_path, write_dataset, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x:0.5").write_text("text")
    pair = write_dataset([[1]]).prefix
    for suffix in (".bin", ".idx"):
        pair.with_suffix(suffix).rename(tmp_path / f"pair:2{suffix}")
    assert parse_mixture(["x:0.5"]) == [("x:0.5", 1)]
    assert parse_mixture(["x:0.5:0.25", "pair:2:0.75"]) == [
        ("x:0.5", Fraction(1, 4)),
        ("pair:2", Fraction(3, 4)),
    ]
    assert parse_mixture(["pair:2"]) == [("pair:2", 1)]


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        (["a:0.7", "b"], "a:0.7 has a share and b has none; give each source one, such as b:0.5"),
        (["a:0", "b:1"], "the share of a:0 is 0;"),
        (["a:-0.5", "b:1"], "the share of a:-0.5 is -0.5"),
        (["a:nan", "b:1"], "the share of a:nan is nan"),
        (["a:1", "b:inf"], "the share of b:inf is inf"),
        (["a:1", "b:1e999999999"], "the share of b:1e999999999 is 1e999999999"),
        (["a:1", "b:1e-999999999"], "the share of b:1e-999999999 is 1e-999999999"),
        (["a:0.5", "b:0.1", "a:0.4"], "a:0.5 and a:0.4 are the same source"),
        (["a:0.5", "x/../a:0.5"], "a:0.5 and x/../a:0.5 are the same source"),
        (["a:0.5", "a:0.5"], "a:0.5 and a:0.5 are the same source"),
    ],
)
def test_what_is_no_mixture_is_refused(sources, reason):
    with pytest.raises(ValueError, match=reason):
        parse_mixture(sources)
