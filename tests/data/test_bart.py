"""BART's and mBART's objectives: shares, lengths of spans, permuted sentences, and that nothing of the text is lost."""

from __future__ import annotations

from dataclasses import replace
from math import exp, factorial

import numpy as np
import pytest

from shardzoo.data import PretrainingData, build_loader, find_objective, train_tokenizer
from shardzoo.data.objectives.bart import TextInfilling

MASK, START, END = 999, 0, 2
INFILLING = TextInfilling(MASK, (START,), (END,))


def text_of(ids: np.ndarray) -> list[int]:
    """The ids without the ends and the masks."""
    assert ids[0] == START
    assert ids[-1] == END
    return [index for index in ids[1:-1].tolist() if index != MASK]


def test_thirty_percent_of_the_tokens_are_masked_in_spans_of_a_poisson_distribution():
    generator, texts, length = np.random.default_rng(0), 1500, 400
    hidden, lengths = np.zeros(length), []
    for _ in range(texts):
        sample = INFILLING(np.arange(length) + 3, generator)
        assert text_of(sample["labels"]) == list(range(3, length + 3))
        kept = text_of(sample["input_ids"])
        assert kept == sorted(kept)
        assert len(kept) == length - 120
        hidden[np.setdiff1d(np.arange(length), np.array(kept) - 3)] += 1
        masked = sample["input_ids"] == MASK
        assert not (masked[1:] & masked[:-1]).any()
        at = np.flatnonzero(masked)
        before, after = sample["input_ids"][at - 1], sample["input_ids"][at + 1]
        before, after = (
            np.where(before == START, 2, before),
            np.where(after == END, length + 3, after),
        )
        lengths.append(after - before - 1)
    hidden = hidden[5:-5]  # elsewhere fewer spans can begin
    assert hidden.min() > 0.25 * texts
    assert hidden.max() < 0.35 * texts
    counts = np.bincount(np.concatenate(lengths))[:8] / sum(map(len, lengths))
    # The last span of a text is cut to the budget, so it is a little shorter than the others, of which there are 40.
    np.testing.assert_allclose(
        counts, [exp(-3) * 3**k / factorial(k) for k in range(8)], atol=0.012
    )


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("length", [2, 3, 7, 40])
def test_the_input_of_any_text_fits_the_space_of_its_labels(length, share):
    generator, infilling = np.random.default_rng(1), replace(INFILLING, probability=share)
    for _ in range(200):
        sample = infilling(np.arange(length) + 3, generator)
        assert len(sample["input_ids"]) <= len(sample["labels"]) == length + 2
        assert len(text_of(sample["input_ids"])) == length - min(
            max(round(length * share), 1), length - 1
        )
        assert MASK in sample["input_ids"]


def test_sentences_are_permuted_whole():
    ends = np.zeros(1000, bool)
    ends[[10, 11]] = True
    infilling, generator = replace(INFILLING, ends=ends), np.random.default_rng(2)
    sentences = [
        [3, 4, 10],
        [5, 10, 11],
        [6, 7, 8, 11],
        [9],
    ]  # two ends in a row belong to one sentence
    tokens = np.concatenate(sentences)
    seen = set()
    for _ in range(400):
        found = infilling.permute(tokens, generator).tolist()
        order = tuple(sorted(range(4), key=lambda number: found.index(sentences[number][0])))
        assert found == [token for number in order for token in sentences[number]]
        seen.add(order)
    assert len(seen) == 24
    assert infilling(tokens, generator)["labels"].tolist() == [START, *tokens, END]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_probability": 0.0}, "mask_probability is 0.0; it must be more than 0"),
        ({"mean_span_length": 0.5}, "mean_span_length is 0.5; it must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_named(settings, message, write_dataset, tokenizer):
    config = PretrainingData(find_objective("bart")(**settings), 16)
    with pytest.raises(ValueError, match=message):
        build_loader(config, write_dataset([[3] * 40]), tokenizer)


@pytest.fixture(scope="module")
def tokenizer(texts, tmp_path_factory):
    return train_tokenizer("roberta-bpe", texts, 400, tmp_path_factory.mktemp("roberta"))


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_batches(name, tokenizer, texts, write_dataset):
    documents = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts[:40]]
    objective = find_objective(name)()
    loader = build_loader(
        PretrainingData(objective, 64, micro_batch_size=8), write_dataset(documents), tokenizer
    )
    batch = next(iter(loader))
    first, last, mask = (
        tokenizer.special["bos_token"],
        tokenizer.eos_token_id,
        tokenizer.special["mask_token"],
    )
    assert batch["input_ids"].shape == batch["labels"].shape == (8, 64)
    for ids, attended, labels in zip(
        batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True
    ):
        assert attended.tolist() == sorted(attended.tolist(), reverse=True)
        tokens = ids[: int(attended.sum())].tolist()
        assert mask in tokens
        assert mask not in labels.tolist()
        if name == "bart":
            ends = [first], [last]
        else:
            ends = [], [last, tokenizer.token_to_id("en_XX")]
        for row in (tokens, labels.tolist()):
            assert (row[: len(ends[0])], row[-len(ends[1]) :]) == ends
    ends_sentence = objective.build(
        loader.dataset.packed.indexed, tokenizer, PretrainingData(objective, 64)
    ).objective
    assert ends_sentence.ends.nonzero()[0].tolist() == sorted({last, *tokenizer.encode(".!?\n")})
