"""GLM's blank infilling: the reference's golden samples, and that every sample is its document."""

from __future__ import annotations

import os
from itertools import pairwise

import numpy as np
import pytest
from every_case import by_turns

from shardzoo.data import BlankInfilling, GLMDataset, GLMMixture, GLMTokens
from shardzoo.data.objectives.blank_infilling import (
    draw_span_lengths,
    find_documents,
    find_sentences,
    place_spans,
)

SAMPLES = int(os.environ.get("SHARDZOO_TEST_SAMPLES", "20000"))  # run with 100000 before a release
IDS = GLMTokens(
    eos=100,
    cls=101,
    sep=102,
    mask=103,
    unk=104,
    sop=105,
    eop=106,
    gmask=107,
    smask=108,
    dblock=109,
    vocab_size=110,
)
ENDS = np.arange(200) % 10 == 9
ENDS[100:] = False
INFILL = BlankInfilling(IDS, sentence_ends=ENDS)
TEXT = np.array([101, *range(1, 31), 100])


def parts(sample: dict[str, np.ndarray]) -> tuple[list[int], list[int], list[int]]:
    """Part A, part B and B's targets."""
    length = int(sample["attention_mask"])
    assert (sample["labels"][:length] == -100).all()
    inputs = sample["input_ids"].tolist()
    return inputs[:length], inputs[length:], sample["labels"][length:].tolist()


def test_golden_token_sample():
    sample = INFILL.build(TEXT, [(12, 14), (19, 22)], np.array([1, 0]), IDS.mask)
    a, b, targets = parts(sample)
    assert len(a) == 29
    assert a == [101, *range(1, 12), 103, *range(14, 19), 103, *range(22, 31), 100]
    assert b == [105, 19, 20, 21, 105, 12, 13]
    assert targets == [19, 20, 21, 106, 12, 13, 106]
    assert sample["position_ids"][0].tolist() == [*range(29), 18, 18, 18, 18, 12, 12, 12]
    assert sample["position_ids"][1].tolist() == [0] * 29 + [1, 2, 3, 4, 1, 2, 3]


def test_golden_sentence_sample():
    assert find_sentences(TEXT, ENDS, IDS) == [(1, 10), (10, 20), (20, 30)]
    sample = INFILL.build(TEXT, [(1, 10)], np.array([0]), IDS.smask)
    a, b, targets = parts(sample)
    assert a == [101, 108, *range(10, 31), 100]
    assert len(a) == 24
    assert b == [105, *range(1, 10)]
    assert targets == [*range(1, 10), 106]
    assert sample["position_ids"][:, 24:].tolist() == [[1] * 10, list(range(1, 11))]


def test_golden_document_infill_sample():
    sample = INFILL.build(TEXT, [(8, 24)], np.array([0]), IDS.gmask)
    a, b, targets = parts(sample)
    assert a == [101, *range(1, 8), 107, *range(24, 31), 100]
    assert len(a) == 17
    assert b == [105, *range(8, 24)]
    assert targets == [*range(8, 24), 106]
    assert sample["position_ids"][:, 17:].tolist() == [[8] * 17, list(range(1, 18))]


def test_golden_document_suffix_sample():
    sample = INFILL.suffix(TEXT, 16)
    a, b, targets = parts(sample)
    assert a == [101, *range(1, 16), 107]
    assert len(a) == 17
    assert b == [105, *range(16, 31)]
    assert targets == [*range(16, 31), 100]
    assert sample["position_ids"][:, 17:].tolist() == [[16] * 16, list(range(1, 17))]


def check(sample: dict[str, np.ndarray], text: np.ndarray) -> float:
    """Rebuild the text from a sample, check all positions, and return the share that was blanked."""
    length = int(sample["attention_mask"])
    inputs, labels = sample["input_ids"], sample["labels"]
    place, inside = sample["position_ids"]
    assert place[:length].tolist() == list(range(length))
    assert not inside[:length].any()
    starts = [length + int(s) for s in np.flatnonzero(inside[length:] == 1)]
    assert (inputs[starts] == IDS.sop).all()
    blanks: dict[int, list[int]] = {}
    for start, stop in zip(starts, [*starts[1:], len(inputs)], strict=True):
        assert inside[start:stop].tolist() == list(range(1, stop - start + 1))
        assert len(set(place[start:stop].tolist())) == 1
        target = labels[start:stop].tolist()
        shown = inputs[start + 1 : stop]
        assert ((shown == labels[start : stop - 1]) | (shown == IDS.dblock)).all()
        if target[-1] == IDS.eop:
            target.pop()
        blanks[int(place[start])] = target
    rebuilt: list[int] = []
    for at, token in enumerate(inputs[:length].tolist()):
        rebuilt += blanks.pop(at) if token in (IDS.mask, IDS.smask, IDS.gmask) else [token]
    assert not blanks
    assert rebuilt == text.tolist()
    return float((labels[length:] != -100).sum() - len(starts)) / len(text)


@pytest.mark.parametrize(
    ("mode", "part"),
    by_turns([("token", 0.4), ("sentence", 0.2), ("document", 0.2), ("single_span", 0.2)], 4),
)
def test_every_sample_is_its_document(mode, part):
    generator = np.random.default_rng(7)
    infill = BlankInfilling(IDS, block_mask_probability=0.1, sentence_ends=ENDS)
    shares = []
    for _ in range(int(part * SAMPLES)):
        lengths = generator.integers(1, 60, 1 if generator.random() < 0.7 else 3)
        documents = [[IDS.cls, *generator.integers(1, 100, n), IDS.eos] for n in lengths]
        text = np.concatenate(documents)
        if generator.random() < 0.3 and len(text) > 10:
            text = text[:-2]  # a window that was cut off
        sample = (
            infill.single_span(text, generator)
            if mode == "single_span"
            else infill(text, mode, generator)
        )
        shares.append(check(sample, text))
    if mode == "document":
        assert 0.5 < np.mean(shares) < 0.9
    elif mode == "token":
        assert np.mean(shares) == pytest.approx(
            0.2, abs=0.02
        )  # at least 15 % of these short texts, by whole spans


def test_span_lengths_follow_the_truncated_poisson():
    lengths = np.array(draw_span_lengths(300_000, np.random.default_rng(0)))
    weights = np.array([3.0**k / np.prod(np.arange(1.0, k + 1)) for k in range(1, 40)])
    weights /= weights.sum()
    found = np.bincount(lengths, minlength=40)[1:40] / len(lengths)
    assert np.abs(found - weights).max() < 0.005


def test_spans_leave_a_gap_and_stay_in_documents():
    generator = np.random.default_rng(0)
    text = np.array([101, *range(1, 21), 100, 101, *range(40, 90), 100])
    assert find_documents(text, IDS) == [
        (74, 0),
        (1, 20),
        (23, 50),
    ]  # nothing stands behind the last end
    assert find_documents(np.arange(1, 11), IDS) == [(0, 9)]  # the last token is never blanked
    reached = set()
    for _ in range(2000):
        spans = place_spans(text, [4, 3, 2, 3], IDS, 0.15, generator)
        assert sorted(stop - start for start, stop in spans) == [2, 3, 3, 4]
        for (_, stop), (start, _) in pairwise(spans):
            assert start > stop
        for start, stop in spans:
            assert (start >= 1 and stop <= 21) or (start >= 23 and stop <= 73)
            reached |= set(range(start, stop))
    assert reached == {*range(1, 21), *range(23, 73)}
    assert place_spans(text, [60], IDS, 0.15, generator) == []


def test_blocks_are_masked_in_the_token_mode_only():
    generator = np.random.default_rng(0)
    infill = BlankInfilling(IDS, block_mask_probability=0.1, sentence_ends=ENDS)
    hidden, shown = 0, 0
    for _ in range(3000):
        sample = infill(TEXT, "token", generator)
        hidden += int((sample["input_ids"] == IDS.dblock).sum())
        shown += int((sample["labels"] != -100).sum() - (sample["labels"] == IDS.eop).sum())
        assert not (infill(TEXT, "sentence", generator)["input_ids"] == IDS.dblock).any()
    assert hidden / shown == pytest.approx(0.1, abs=0.01)


def test_masks_tell_the_modes_apart():
    generator = np.random.default_rng(0)
    plain = BlankInfilling(IDS, sentence_ends=ENDS, task_masks=False)
    for mode, mask in (("token", IDS.mask), ("sentence", IDS.smask), ("document", IDS.gmask)):
        assert (INFILL(TEXT, mode, generator)["input_ids"] == mask).any()
        assert (plain(TEXT, mode, generator)["input_ids"] == IDS.mask).any()


def test_impossible_texts_and_settings_are_named():
    generator = np.random.default_rng(0)
    with pytest.raises(ValueError, match="at least 3 tokens"):
        INFILL(np.array([101, 1]), "token", generator)
    with pytest.raises(ValueError, match="neither"):
        INFILL(np.array([101, 100, 101, 100]), "token", generator)
    with pytest.raises(ValueError, match="needs sentence_ends"):
        BlankInfilling(IDS)(TEXT, "sentence", generator)
    with pytest.raises(ValueError, match="between 0 and 1"):
        GLMMixture(token=0.8, sentence=0.3)


@pytest.fixture
def dataset(write_dataset) -> GLMDataset:
    generator = np.random.default_rng(0)
    documents = [[*generator.integers(1, 100, n), IDS.eos] for n in generator.integers(5, 400, 40)]
    mixture = GLMMixture(token=0.4, sentence=0.3, single_span=0.1, short=0.3)
    return GLMDataset(write_dataset(documents), 128, INFILL, mixture, seed=3, mode_block=4)


def test_corpus_samples_rebuild_texts_of_the_corpus(dataset):
    corpus = dataset.indexed.tokens.tolist()
    joined = ",".join(map(str, corpus))
    for number in range(400):
        text = dataset.draw_text(np.random.default_rng(number))
        assert 3 <= len(text) <= 128
        assert text[0] == IDS.cls
        for piece in np.split(text, np.flatnonzero(text == IDS.cls))[1:]:
            assert ",".join(map(str, piece[1:].tolist())) in joined
        sample = dataset[number]
        again = dataset[number]
        assert all(np.array_equal(sample[name], again[name]) for name in sample)


def test_modes_come_in_their_shares_and_in_blocks(dataset):
    modes = [dataset._draw_mode(block) for block in range(20_000)]
    shares = {
        mode: np.mean([m == mode for m, _ in modes])
        for mode in ("single_span", "token", "sentence", "document")
    }
    assert shares == pytest.approx(
        {"single_span": 0.1, "token": 0.36, "sentence": 0.27, "document": 0.27}, abs=0.015
    )
    assert np.mean([short for _, short in modes]) == pytest.approx(0.3, abs=0.015)
    kinds = [int((dataset[n]["input_ids"] == IDS.gmask).any()) for n in range(80)]
    assert all(len(set(kinds[start : start + 4])) == 1 for start in range(0, 80, 4))
