"""BERT's and RoBERTa's masking, and sentence pairs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from shardzoo.data import Masking, SentencePairDataset, SentencePairs, masked_dataset
from shardzoo.data.objectives.bert import truncate_pair
from shardzoo.data.objectives.masking import find_continuations

PAD, CLS, SEP, MASK, V = 0, 1, 2, 3, 5000
MASKING = Masking(MASK, V, (PAD, CLS, SEP))


def test_80_10_10_of_exactly_15_percent():
    generator = np.random.default_rng(0)
    chosen = masked = kept = 0
    for _ in range(4000):
        tokens = np.concatenate([[CLS], generator.integers(4, V, 400), [SEP]])
        sample = MASKING(tokens, generator)
        asked = sample["labels"] != -100
        assert asked.sum() == 60
        assert not asked[[0, -1]].any()
        assert np.array_equal(sample["labels"][asked], tokens[asked])
        assert np.array_equal(sample["input_ids"][~asked], tokens[~asked])
        chosen += 60
        masked += int((sample["input_ids"][asked] == MASK).sum())
        kept += int((sample["input_ids"][asked] == tokens[asked]).sum())
        assert (sample["input_ids"][asked] >= MASK).all()  # no other special token is drawn
    assert masked / chosen == pytest.approx(0.8, abs=0.003)
    assert kept / chosen == pytest.approx(0.1 + 0.1 / V, abs=0.003)


def test_every_place_is_equally_likely_and_random_tokens_are_uniform():
    generator = np.random.default_rng(1)
    tokens = np.arange(100, 200)
    places, drawn = np.zeros(100), np.zeros(24)
    masking = Masking(MASK, 24, (PAD, CLS, SEP))
    for _ in range(8000):
        places[masking.choose(tokens, generator)] += 1
        inputs = masking(np.full(100, 10), generator)["input_ids"]
        drawn += np.bincount(inputs[(inputs != 10) & (inputs != MASK)], minlength=24)
    assert places.sum() == 8000 * 15
    assert np.abs(places / 8000 - 0.15).max() < 0.02
    assert drawn[:4].sum() == 0
    others = drawn[np.arange(24) > 3][np.arange(4, 24) != 10]
    assert np.abs(others - others.mean()).max() < 4.5 * np.sqrt(others.mean())


@pytest.mark.parametrize("longest", [1, 3])
def test_words_are_masked_whole(longest):
    generator = np.random.default_rng(2)
    continues = np.zeros(V, bool)
    continues[2500:] = True
    masking = Masking(MASK, V, (PAD, CLS, SEP), continues=continues, longest_ngram=longest)
    chosen = 0
    for _ in range(500):
        lengths = generator.integers(1, 5, 60)
        words = [
            [generator.integers(4, 2500), *generator.integers(2500, V, n - 1)] for n in lengths
        ]
        tokens = np.concatenate([[CLS], *words, [SEP]]).astype(np.int64)
        asked = masking(tokens, generator)["labels"] != -100
        borders = np.cumsum([1, *lengths])
        for start, stop in pairwise(borders):
            assert asked[start:stop].all() or not asked[start:stop].any()
        budget = round(0.15 * lengths.sum())
        assert asked.sum() <= budget
        chosen += asked.sum() / budget
    assert chosen / 500 > 0.98


def test_ngrams_have_probability_1_over_n():
    generator = np.random.default_rng(3)
    masking = Masking(MASK, V, probability=0.02, longest_ngram=3)
    runs = np.zeros(4)
    for _ in range(3000):
        chosen = masking.choose(np.full(500, 9), generator)
        lengths = np.diff(np.flatnonzero(np.diff(chosen, prepend=-9, append=10_000) > 1))
        runs += np.bincount(lengths, minlength=4)[:4]
    share = runs[1:] / runs[1:].sum()
    assert share == pytest.approx(
        np.array([6, 3, 2]) / 11, abs=0.05
    )  # neighbours that touch blur it a little


@pytest.mark.parametrize("tokens", [[CLS, SEP], [CLS, 7, SEP], [MASK, MASK]])
def test_texts_with_little_to_mask(tokens):
    sample = MASKING(np.array(tokens), np.random.default_rng(0))
    assert (sample["labels"] != -100).sum() == tokens.count(7)
    long_word = Masking(MASK, V, continues=np.ones(V, bool))(
        np.arange(4, 30), np.random.default_rng(0)
    )
    assert (long_word["labels"] != -100).all()  # one word longer than the budget is still asked for


def test_continuations_of_three_kinds_of_vocabulary():
    assert find_continuations(["the", "##ing", "[CLS]"]).tolist() == [False, True, False]
    assert find_continuations(["▁the", "ing", "<s>"]).tolist() == [False, True, False]
    assert find_continuations(["Ġthe", "ing", "Ċ"]).tolist() == [False, True, False]


def test_impossible_settings_are_named():
    for change, named in [
        ({"probability": 1.0}, r"1\.0"),
        ({"longest_ngram": 0}, "0"),
        ({"vocab_size": 4}, "4"),
    ]:
        with pytest.raises(ValueError, match=named):
            Masking(**{"mask_token_id": 3, "vocab_size": 9, "special_ids": (0, 1, 2), **change})


def test_roberta_samples_are_full(write_dataset):
    dataset = masked_dataset(
        write_dataset([list(range(10, 90))] * 3),
        Masking(MASK, 100),
        32,
        cls_token_id=CLS,
        sep_token_id=SEP,
    )
    for number in range(20):
        sample = dataset[number]
        assert len(sample["input_ids"]) == 32
        assert (sample["input_ids"][0], sample["input_ids"][-1]) == (CLS, SEP)
        assert (sample["labels"] != -100).sum() == round(0.15 * 30)


def test_roberta_samples_say_where_documents_begin(write_dataset):
    """Documents end with 9. The first token belongs to the first of them, and the last one to the last."""
    corpus = write_dataset([[10 + k] * size + [9] for k, size in enumerate((3, 40, 1, 17))])
    arguments = {"cls_token_id": CLS, "sep_token_id": SEP}
    joined = masked_dataset(corpus, Masking(MASK, 100), 24, **arguments)
    apart = masked_dataset(corpus, Masking(MASK, 100), 24, **arguments, separate_documents=True)
    for number in range(12):
        sample = apart[number]
        for name, values in joined[number].items():
            assert (sample[name] == values).all()
        words = plain(sample)[1:-1]
        wanted = [0, 0, *np.cumsum(words[:-1] == 9)]
        assert sample["seq_idx"].tolist() == [*wanted, wanted[-1]]


def plain(sample: dict[str, np.ndarray]) -> np.ndarray:
    return np.where(sample["labels"] != -100, sample["labels"], sample["input_ids"])


@pytest.mark.parametrize("kind", ["nsp", "sop"])
def test_half_of_the_pairs_are_changed_and_segments_are_marked(kind):
    generator = np.random.default_rng(4)
    sentences = [np.arange(10 * k, 10 * k + 5) for k in range(1, 6)]
    others = [np.arange(1000, 1005), np.arange(1005, 1010)]
    pairs = SentencePairs(CLS, SEP, MASKING, 64, kind)
    changed = 0
    for _ in range(1000):
        sample = pairs(sentences, generator, others)
        tokens, types = plain(sample), sample["token_type_ids"]
        first_sep = int(np.flatnonzero(tokens == SEP)[0])
        assert types.tolist() == [0] * (first_sep + 1) + [1] * (len(tokens) - first_sep - 1)
        assert (tokens[0], tokens[-1]) == (CLS, SEP)
        first, second = tokens[1:first_sep], tokens[first_sep + 1 : -1]
        label = int(sample["next_sentence_label"])
        changed += label
        joined = np.concatenate(sentences)
        if label == 0:
            assert np.array_equal(np.concatenate([first, second]), joined)
        elif kind == "sop":
            assert np.array_equal(np.concatenate([second, first]), joined)
        else:
            assert second[0] in (1000, 1005)
            assert np.array_equal(first, joined[: len(first)])
    assert changed / 1000 == pytest.approx(0.5, abs=0.05)


def test_long_pairs_are_cut_to_length_from_both_ends():
    generator = np.random.default_rng(5)
    a, b = np.arange(100), np.arange(1000, 1020)
    starts = set()
    for _ in range(50):
        first, second = truncate_pair(a, b, 60, generator)
        assert len(first) + len(second) == 60
        assert (np.diff(first) == 1).all()
        assert len(second) == 20  # only the longer one is cut
        starts.add(int(first[0]))
    assert len(starts) > 5


def test_pairs_over_a_corpus_of_sentences(write_dataset):
    documents = [
        [list(range(100 * d + 10 * s, 100 * d + 10 * s + 8)) for s in range(6)] for d in range(1, 9)
    ]
    indexed = write_dataset([*documents, [[5, 6]]])
    pairs = SentencePairs(CLS, SEP, Masking(MASK, V, (PAD, CLS, SEP)), 40)
    dataset = SentencePairDataset(indexed, pairs, seed=1)
    labels = []
    for number in range(200):
        sample = dataset[number]
        assert len(sample["input_ids"]) <= 40
        tokens = plain(sample)
        border = int((sample["token_type_ids"] == 0).sum())
        first, second = tokens[1 : border - 1], tokens[border:-1]
        same_document = first[0] // 100 == second[0] // 100
        assert same_document == (sample["next_sentence_label"] == 0)
        labels.append(int(sample["next_sentence_label"]))
    assert 60 < sum(labels) < 140
    again = SentencePairDataset(indexed, pairs, seed=1)
    assert again[150]["input_ids"].tolist() == dataset[150]["input_ids"].tolist()
    with pytest.raises(ValueError, match="no document of two sentences"):
        SentencePairDataset(write_dataset([[[1, 2, 3]]]), pairs)
    with pytest.raises(ValueError, match="objective bert-sop"):
        SentencePairDataset(write_dataset(documents[:1]), pairs)
