"""Samples of each objective against its published definition, which is written out here once more.

Corpora are numbers that count up, and every token of a corpus is different, so a sample tells which text it is made of.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from every_case import every_day
from safetensors.numpy import load_file

from shardzoo.data import (
    BlankInfilling,
    GLMObjective,
    GLMTokens,
    NextSentenceObjective,
    PadBatch,
    PretrainingData,
    RobertaObjective,
    SentenceOrderObjective,
    T5Objective,
    Tokenizer,
    UL2Objective,
    build_dataset,
    build_loader,
    find_objective,
    load_tokenizer,
    objective_names,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "glm_tiny.safetensors"
PAD, EOS, CLS, SEP, MASK, UNK = range(6)
FIRST = 10  # the first token of a text


class Numbers(Tokenizer):
    """A vocabulary of numbers, of which every tenth ends a sentence."""

    def __init__(self, size: int) -> None:
        self.names = ["[PAD]", "</s>", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
        self.names += [f"{n}" if n % 10 else "." for n in range(6, size)]
        self.special = {
            "pad_token": 0,
            "bos_token": 1,
            "eos_token": 1,
            "cls_token": 2,
            "sep_token": 3,
            "mask_token": 4,
        }
        self.special |= {"unk_token": 5}
        self.vocab_size = size

    def add_tokens(self, tokens: Sequence[str]) -> None:
        self.names += [token for token in tokens if token not in self.names]
        self.vocab_size = len(self.names)

    def token_to_id(self, token: str) -> int | None:
        return self.names.index(token) if token in self.names else None

    def id_to_token(self, index: int) -> str:
        return self.names[index]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        raise NotImplementedError


def is_share(count: int, total: int, share: float) -> None:
    """A count of independent draws is within 4.5 standard deviations (a false alarm in 150,000)."""
    assert abs(count - share * total) <= 4.5 * sqrt(total * share * (1 - share)), (
        f"{count} of {total} is not {share:.4f}"
    )


def counting(total: int, documents: int) -> list[list[int]]:
    """Documents of random lengths with the numbers from FIRST on."""
    cuts = np.sort(
        np.random.default_rng(total).choice(np.arange(1, total), documents - 1, replace=False)
    )
    return [part.tolist() for part in np.split(np.arange(FIRST, FIRST + total), cuts)]


def are_the_corpus_once(texts: list[list[int]], documents: list[list[int]]) -> None:
    assert sorted(token for text in texts for token in text) == sorted(
        token for part in documents for token in part
    )
    ends, beginnings = {part[-1] for part in documents}, {part[0] for part in documents}
    for text in texts:
        assert all(b == a + 1 or (a in ends and b in beginnings) for a, b in pairwise(text))


def published_counts(tokens: int, density: float, mean: float) -> tuple[int, int]:
    """Corrupted tokens and spans, by `random_spans_noise_mask` of the T5 code."""
    noise = min(max(round(tokens * density), 1), tokens - 1)
    return noise, max(round(noise / mean), 1)


def published_lengths(tokens: int, density: float, mean: float) -> tuple[int, int]:
    """A sentinel for each span on both sides, and one end each: `random_spans_helper` of the T5 code."""
    noise, spans = published_counts(tokens, density, mean)
    return tokens - noise + spans + 1, noise + spans + 1


def filled(
    inputs: Sequence[int], labels: Sequence[int], sentinels: list[int]
) -> tuple[list[int], list[int]]:
    """The text, with the target's spans in the place of the input's sentinels, and the spans' lengths."""
    assert inputs[-1] == labels[-1] == EOS
    known = set(sentinels)
    used = [token for token in inputs if token in known]
    assert used == sentinels[: len(used)] == [token for token in labels if token in known]
    spans: dict[int, list[int]] = {}
    for token in labels[:-1]:
        if token in known:
            spans[token] = current = []
        else:
            current.append(token)
    text = [
        token for found in inputs[:-1] for token in (spans[found] if found in known else [found])
    ]
    return text, [len(spans[sentinel]) for sentinel in used]


def sentinels_of(tokenizer: Numbers) -> list[int]:
    return [tokenizer.names.index(f"<extra_id_{number}>") for number in range(100)]


@pytest.mark.parametrize(
    ("density", "mean", "length"),
    every_day(
        [(0.15, 3.0, 61), (0.3, 5.0, 100), (0.1, 1.0, 33)], more=[(0.15, 3.0, 512), (0.5, 2.0, 40)]
    ),
)
def test_span_corruption(density, mean, length, write_dataset):
    raw = 2
    while published_lengths(raw + 1, density, mean)[0] <= length:
        raw += 1
    documents, tokenizer = counting(40 * raw, 7), Numbers(FIRST + 40 * raw)
    objective = T5Objective(density, mean)
    dataset = build_dataset(PretrainingData(objective, length), write_dataset(documents), tokenizer)
    assert (dataset.samples_per_epoch, dataset.tokens_per_epoch) == (40, 40 * raw)
    assert objective.lengths(length) == (length, published_lengths(raw, density, mean)[1])
    texts, beginnings = [], set()
    for number in range(40):
        sample = {name: value.tolist() for name, value in dataset[number].items()}
        assert (len(sample["input_ids"]), len(sample["labels"])) == published_lengths(
            raw, density, mean
        )
        text, spans = filled(sample["input_ids"], sample["labels"], sentinels_of(tokenizer))
        assert (sum(spans), len(spans)) == published_counts(raw, density, mean)
        assert min(spans) >= 1
        texts.append(text)
        beginnings.add(text.index(sample["labels"][1]))
    are_the_corpus_once(texts, documents)
    assert len(beginnings) > 2  # not always the same positions
    assert min(beginnings) >= 1  # a text begins with a token that is kept


def test_the_target_of_span_corruption_is_as_long_as_its_text_needs(write_dataset):
    indexed = write_dataset(counting(6000, 3))
    for target, width in ((None, 114), (128, 128), (60, 60)):
        batch = next(iter(build_loader(PretrainingData("t5", 512, target), indexed, Numbers(6010))))
        assert (batch["input_ids"].shape, batch["labels"].shape) == ((16, 512), (16, width))
    assert (batch["labels"] != -100).sum(1).unique().item() <= 60


class Masks:
    """Counts what happened to the tokens that a masked objective asks for."""

    def __init__(self, vocabulary: int) -> None:
        self.fates, self.vocabulary = Counter(), vocabulary

    def original(self, sample: dict[str, np.ndarray], probability: float) -> np.ndarray:
        """The text before it was masked."""
        inputs, labels = sample["input_ids"], sample["labels"]
        asked = labels != -100
        original = np.where(asked, labels, inputs)
        assert asked.sum() == round(
            probability * (original > UNK).sum()
        )  # of the tokens that are not special
        assert (labels[asked] > UNK).all()
        for shown, token in zip(inputs[asked].tolist(), labels[asked].tolist(), strict=True):
            self.fates["mask" if shown == MASK else "same" if shown == token else "random"] += 1
            assert shown == MASK or UNK < shown < self.vocabulary
        return original

    def are_80_10_10(self) -> None:
        total, drawn = sum(self.fates.values()), self.vocabulary - UNK - 1
        is_share(self.fates["mask"], total, 0.8)
        is_share(self.fates["random"], total, 0.1 * (1 - 1 / drawn))
        is_share(self.fates["same"], total, 0.1 * (1 + 1 / drawn))


@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_roberta_masks_differ_in_every_epoch(probability, write_dataset):
    documents = [[*range(first, first + 63), SEP] for first in range(FIRST, FIRST + 50 * 63, 63)]
    masks, positions, places = Masks(FIRST + 50 * 63), defaultdict(set), np.zeros(66)
    config = PretrainingData(RobertaObjective(probability), 66)
    dataset = build_dataset(config, write_dataset(documents), Numbers(masks.vocabulary))
    for epoch in range(30):
        for number in range(50):
            sample = dataset[50 * epoch + number]
            original = masks.original(sample, probability).tolist()
            assert original == [CLS, *documents[(original[1] - FIRST) // 63], SEP]
            positions[original[1]].add(tuple(np.flatnonzero(sample["labels"] != -100)))
            places += sample["labels"] != -100
    assert [len(different) for different in positions.values()] == [30] * 50
    for count in places[1:64]:
        is_share(count, 1500, round(probability * 63) / 63)
    masks.are_80_10_10()


@pytest.mark.parametrize("kind", [NextSentenceObjective, SentenceOrderObjective])
def test_sentence_pairs(kind, write_dataset):
    size, sentences = 7, 6
    starts = range(FIRST, FIRST + 40 * size * sentences, size * sentences)
    documents = [
        [list(range(s, s + size)) for s in range(d, d + size * sentences, size)] for d in starts
    ]
    masks = Masks(FIRST + 40 * size * sentences)
    config = PretrainingData(
        kind(mask_probability=0.2, short_probability=0.0), size * sentences + 3
    )
    dataset = build_dataset(config, write_dataset(documents), Numbers(masks.vocabulary))
    assert (dataset.samples_per_epoch, dataset.tokens_per_epoch) == (40, 40 * size * sentences)
    changed, borders, others = 0, Counter(), set()
    for number in range(1600):
        sample = dataset[number]
        tokens = masks.original(sample, 0.2).tolist()
        middle = tokens.index(SEP)
        first, second = tokens[1:middle], tokens[middle + 1 : -1]
        assert (tokens[0], tokens[-1]) == (CLS, SEP)
        assert sample["token_type_ids"].tolist() == [0] * (middle + 1) + [1] * (len(second) + 1)
        document, other = ((part[0] - FIRST) // (size * sentences) for part in (first, second))
        whole = list(range(starts[document], starts[document] + size * sentences))
        label = int(sample["next_sentence_label"])
        changed += label
        if label == 0:
            assert first + second == whole
            borders[len(first)] += 1
        elif kind is SentenceOrderObjective:
            assert second + first == whole
        else:
            assert other != document
            assert set(second) <= set(range(starts[other], starts[other] + size * sentences))
            assert set(first) <= set(whole)
            others.add(other)
    is_share(changed, 1600, 0.5)
    for border in range(size, size * sentences, size):
        is_share(borders[border], 1600 - changed, 1 / (sentences - 1))
    assert len(others) in (40, 0)
    masks.are_80_10_10()


@pytest.mark.parametrize("short", every_day([0.25], more=[0.0]))
def test_a_share_of_the_pairs_is_short(short, write_dataset):
    documents = [
        [[token] for token in part] for part in counting(40_000, 4)
    ]  # sentences of a token fill any length
    config = PretrainingData(SentenceOrderObjective(short_probability=short), 43)
    dataset = build_dataset(config, write_dataset(documents), Numbers(40_010))
    total = int(dataset.samples_per_epoch)
    lengths = [len(dataset[number]["input_ids"]) for number in range(total)]
    assert max(lengths) == 43
    if (
        short
    ):  # lengths of 2 to 40 are equally likely, so one in 39 of the short ones is not shorter
        is_share(sum(length < 43 for length in lengths), total, short * 38 / 39)
    else:
        assert sum(length < 43 for length in lengths) <= 4  # the ends of documents


def glm_positions(
    inputs: list[int], labels: list[int], border: int, ids: GLMTokens
) -> list[list[int]]:
    """Du et al. 2022, section 2.2: the first counts the text with its blanks, and stands at a blank in its content.

    The second is 0 in the text, and counts a blank's content from 1, the start token included.
    """
    masks = [place for place in range(border) if inputs[place] in (ids.mask, ids.smask, ids.gmask)]
    starts = [place for place in range(border, len(inputs)) if inputs[place] == ids.sop]
    in_text_order = sorted(labels[start] for start in starts)  # a text counts up
    assert len(masks) == len(starts)
    first, second, inside = list(range(border)), [0] * border, 0
    for place in range(border, len(inputs)):
        inside = 1 if inputs[place] == ids.sop else inside + 1
        start = place - inside + 1
        first.append(masks[in_text_order.index(labels[start])])
        second.append(inside)
    return [first, second]


def test_glm_blanks(write_dataset):
    documents = [[*range(first, first + 299), PAD] for first in range(FIRST, FIRST + 40 * 300, 300)]
    tokenizer = Numbers(FIRST + 40 * 300)
    config = PretrainingData(GLMObjective(vocabulary="bert"), 96)
    dataset = build_dataset(config, write_dataset(documents), tokenizer)
    ids = dataset.infilling.tokens
    assert (ids.eos, ids.cls, ids.mask) == (PAD, CLS, MASK)
    assert [ids.sop, ids.eop, ids.gmask, ids.smask] == list(range(FIRST + 12000, FIRST + 12004))
    modes, in_order = Counter(), Counter()
    for number in range(3000):
        sample = dataset[number]
        inputs, labels, border = (
            sample["input_ids"].tolist(),
            sample["labels"].tolist(),
            int(sample["attention_mask"]),
        )
        assert sample["position_ids"].tolist() == glm_positions(inputs, labels, border, ids)
        assert labels[:border] == [-100] * border
        starts = [place for place in range(border, len(inputs)) if inputs[place] == ids.sop]
        spans = [labels[start:stop] for start, stop in pairwise([*starts, len(inputs)])]
        assert [token for span in spans for token in (ids.sop, *span[:-1])] == inputs[
            border:
        ]  # each predicts the next
        (mask,) = {token for token in inputs[:border] if token in (ids.mask, ids.smask, ids.gmask)}
        modes[mask] += 1
        if len(spans) == 2:
            in_order[spans[0][0] < spans[1][0]] += 1
        at_the_end = mask == ids.gmask and inputs[border - 1] == mask
        contents = [span if at_the_end else span[:-1] for span in spans]
        assert at_the_end or {span[-1] for span in spans} == {ids.eop}
        blanks = iter(sorted(contents))
        text = [
            t for token in inputs[:border] for t in (next(blanks) if token == mask else [token])
        ]
        assert text[0] == CLS
        assert text[1:] in (
            list(range(text[1], text[1] + len(text) - 1)),
            [*range(text[1], text[-2] + 1), PAD],
        )
        hidden = sum(map(len, contents))
        if mask == ids.gmask:
            assert len(spans) == 1
            assert hidden >= len(text) // 2
        else:
            assert hidden >= int(0.15 * len(text))
        if mask == ids.smask:  # whole sentences; the first may have been cut, and the last
            assert all(span[0] % 10 == 1 or span[0] == text[1] for span in contents)
            assert all(span[-1] % 10 == 0 or span[-1] == text[-1] for span in contents)
    for mask, share in ((ids.mask, 0.5), (ids.smask, 0.3), (ids.gmask, 0.2)):
        is_share(modes[mask], 3000, share)
    is_share(in_order[True], in_order.total(), 0.5)


def test_glm_positions_are_those_of_the_golden_file():
    """Its two rows have blanks at 3 and 7, and at 2, 5 and 8, of a text of 12 and 9 tokens with its blanks."""
    golden = load_file(GOLDEN)
    ids = GLMTokens(200, 201, 202, 203, 204, 205, 206, 207, 208, 209, 210)
    rows = [(19, [(3, 8), (11, 15)]), (18, [(2, 5), (7, 14), (16, 18)])]
    samples = [
        BlankInfilling(ids).build(
            np.arange(FIRST, FIRST + length), spans, np.arange(len(spans)), ids.mask
        )
        for length, spans in rows
    ]
    batch = PadBatch(0, {"input_ids": 32, "position_ids": 32, "labels": 32})(samples)
    assert batch["position_ids"].tolist() == golden["position_ids"].tolist()
    assert batch["attention_mask"].tolist() == golden["sep"].tolist()
    assert (batch["labels"] != -100).tolist() == (golden["loss_mask"] == 1).tolist()
    for sample in samples:
        inputs, labels, border = (
            sample["input_ids"].tolist(),
            sample["labels"].tolist(),
            int(sample["attention_mask"]),
        )
        assert glm_positions(inputs, labels, border, ids) == sample["position_ids"].tolist()


@pytest.mark.parametrize(("length", "target"), [(20, None), (64, 20)])
def test_prefix_lm(length, target, write_dataset):
    documents = counting(20 * 200, 9)
    config = PretrainingData("prefix-lm", length, target)
    dataset = build_dataset(config, write_dataset(documents), Numbers(FIRST + 20 * 200))
    assert dataset.samples_per_epoch == 200
    borders, texts = Counter(), []
    for number in range(4000):
        sample = dataset[number]
        inputs, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert inputs[-1] == labels[-1] == EOS
        texts.append(inputs[:-1] + labels[:-1])
        assert len(texts[-1]) == 20
        borders[len(inputs) - 1] += 1
    are_the_corpus_once(texts[:200], documents)
    for border in range(1, 20):
        is_share(borders[border], 4000, 1 / 19)


# Tay et al. 2022, table 1: mode, share of corrupted tokens, mean span; the sequential one is prefix language modeling.
DENOISERS = [
    ("[NLU]", 0.15, 3.0), ("[NLU]", 0.15, 8.0),
    ("[NLG]", 0.5, 3.0), ("[NLG]", 0.5, 8.0), ("[NLG]", 0.15, 64.0), ("[NLG]", 0.5, 64.0),
]  # fmt: skip


def longest_text(length: int, target: int) -> int:
    """The longest text that fits every denoiser; the mode token takes one place of the input."""
    fits = [
        raw for raw in range(2, 2 * length)
        if raw + 2 <= length + 1 and raw // 2 + 1 <= target  # a prefix of all but one, or a rest of half, and an end
        and all(published_lengths(raw, *spans)[0] < length for _, *spans in DENOISERS)
        and all(published_lengths(raw, *spans)[1] <= target for _, *spans in DENOISERS)
    ]  # fmt: skip
    return max(fits)


@pytest.mark.parametrize(
    ("length", "target", "shares"),
    every_day(
        [(128, None, ()), (64, 40, (0.6, 0.0))], more=[(300, 90, (0.5, 0.2)), (64, 64, (0.0, 1.0))]
    ),
)
def test_ul2(length, target, shares, write_dataset):
    raw = longest_text(length, target or length)
    documents, tokenizer = counting(200 * raw, 5), Numbers(FIRST + 200 * raw)
    dataset = build_dataset(
        PretrainingData(UL2Objective(*shares), length, target), write_dataset(documents), tokenizer
    )
    sentinels = sentinels_of(tokenizer)
    kinds = {
        (mode, *published_counts(raw, *spans)): place
        for place, (mode, *spans) in enumerate(DENOISERS)
    }
    found, texts, rests = Counter(), [], []
    for number in range(2000):
        sample = dataset[number]
        inputs, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert len(inputs) <= length
        assert len(labels) <= (target or length)
        mode = tokenizer.names[inputs[0]]
        if mode == "[S2S]":
            assert inputs[-1] == labels[-1] == EOS
            texts.append(inputs[1:-1] + labels[:-1])
            rests.append(len(labels) - 1)
            found["sequential"] += 1
        else:
            text, spans = filled(inputs[1:], labels, sentinels)
            texts.append(text)
            found[kinds[mode, sum(spans), len(spans)]] += 1
    are_the_corpus_once(texts[:200], documents)
    regular, extreme = shares or (2 / 7, 4 / 7)
    for place, (mode, *_) in enumerate(DENOISERS):
        is_share(found[place], 2000, regular / 2 if mode == "[NLU]" else extreme / 4)
    is_share(found["sequential"], 2000, max(0, 1 - regular - extreme))
    if rests:  # uniform up to half of the text, so a quarter on average
        assert (min(rests), max(rests)) == (1, raw // 2)
        assert np.mean(rests) == pytest.approx(
            (1 + raw // 2) / 2, abs=4.5 * raw / 2 / sqrt(12 * len(rests))
        )


def test_ul2_batches_have_one_shape_and_its_tokens_are_added_once(write_dataset):
    indexed, tokenizer = write_dataset(counting(3000, 3)), Numbers(3010)
    for _ in range(2):
        batch = next(iter(build_loader(PretrainingData("ul2", 64, 50), indexed, tokenizer)))
        assert (batch["input_ids"].shape, batch["labels"].shape) == ((16, 64), (16, 50))
        assert tokenizer.names[3010:] == [
            *(f"<extra_id_{n}>" for n in range(99, -1, -1)),
            "[NLU]",
            "[NLG]",
            "[S2S]",
        ]
    assert UL2Objective().lengths(64) == (64, 64)
    for shares in ((-0.1, 0.5), (0.5, 0.6)):
        with pytest.raises(ValueError, match=rf"regular is {shares[0]} and extreme {shares[1]}"):
            UL2Objective(*shares)
    with pytest.raises(ValueError, match="no text fits"):
        build_dataset(PretrainingData("ul2", 3), indexed, tokenizer)


def lacking(names: Iterable[str]) -> Numbers:
    tokenizer = Numbers(60)
    for name in names:
        del tokenizer.special[name]
    return tokenizer


@pytest.mark.parametrize(
    ("objective", "lacks", "says"),
    [
        ("roberta", ["mask_token"], "no mask_token .*--kind wordpiece or roberta-bpe"),
        ("bert-nsp", ["cls_token", "sep_token"], "no cls_token, sep_token .it has pad_token, .*--kind wordpiece"),
        ("bert-sop", ["mask_token"], "'bert-sop' needs a tokenizer with cls_token, sep_token, mask_token"),
        ("t5", ["eos_token", "sep_token"], "no eos_token .*--kind sentencepiece"),
        ("prefix-lm", ["eos_token", "sep_token"], "'prefix-lm' needs a tokenizer with eos_token"),
        ("ul2", ["eos_token", "sep_token"], "'ul2' needs a tokenizer with eos_token"),
        ("glm", [], "not a gpt2 vocabulary: it has no <.endoftext.>; use the vocabulary bert$"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_lacks_a_token_is_refused(objective, lacks, says):
    tokenizer = lacking(lacks)
    with pytest.raises(ValueError, match=says):
        find_objective(objective)().add_special_tokens(tokenizer)
    assert tokenizer.vocab_size == 60
    find_objective(objective)(
        **({"vocabulary": "bert"} if objective == "glm" else {})
    ).add_special_tokens(Numbers(60))
    find_objective("gpt")().add_special_tokens(tokenizer)


def test_glm_names_what_a_tokenizer_without_its_tokens_can_be(tokenizer_dir):
    with pytest.raises(ValueError, match=r"no \[PAD\], \[CLS\].*; use the vocabulary gpt2"):
        GLMObjective(vocabulary="bert").add_special_tokens(load_tokenizer(tokenizer_dir))
    bare = Numbers(60)
    bare.names[:6] = [f"x{n}" for n in range(6)]
    with pytest.raises(
        ValueError, match="use the vocabulary chinese if it is a SentencePiece model"
    ):
        GLMObjective().add_special_tokens(bare)


def test_settings_that_cannot_work_are_named(write_dataset):
    indexed = write_dataset(counting(3000, 3))
    for name in ("roberta", "bert-nsp", "t5", "glm"):
        for value in (-0.1, 1.5):
            with pytest.raises(
                ValueError, match=f"^mask_probability is {value}; it must be between 0 and 1$"
            ):
                find_objective(name)(mask_probability=value)
    with pytest.raises(ValueError, match=r"short_probability is 2\.0"):
        NextSentenceObjective(short_probability=2.0)
    with pytest.raises(ValueError, match="unknown GLM vocabulary 'xlnet'; use one of bert, gpt2"):
        GLMObjective(vocabulary="xlnet").add_special_tokens(Numbers(60))
    for objective in (
        RobertaObjective(0.0),
        T5Objective(1.0),
        GLMObjective(vocabulary="bert", mask_probability=0.0),
    ):
        with pytest.raises(ValueError, match="it must be more than 0 and less than 1"):
            build_dataset(PretrainingData(objective, 64), indexed, Numbers(3010))
    for lengths in ({"sequence_length": 0}, {"target_length": 0}):
        with pytest.raises(ValueError, match="_length is 0; it must be at least 1"):
            PretrainingData("t5", **lengths)


def test_glm_documents_that_end_with_sep_end_with_its_own_end(write_dataset):
    """BERT's vocabulary has no end-of-text token, so its corpora have [SEP] there; GLM's end is [PAD]."""
    first, second = ([[*range(10, 20), end], [*range(20, 30), end]] for end in (SEP, PAD))
    config = PretrainingData(GLMObjective(vocabulary="bert"), 64)
    datasets = [
        build_dataset(config, write_dataset(documents), Numbers(60))
        for documents in (first, second)
    ]
    for number in range(50):
        ours, expected = (dataset[number] for dataset in datasets)
        assert all(np.array_equal(ours[name], expected[name]) for name in expected)
        assert SEP not in ours["input_ids"]


def test_whole_words_and_ngrams_are_settings(write_dataset):
    """Words are pairs of tokens, of which two are masked at once in a third of the cases (1/2 to 1)."""
    tokenizer = Numbers(FIRST + 4000)
    tokenizer.names = [
        f"##{name}" if n % 2 and n >= FIRST else name for n, name in enumerate(tokenizer.names)
    ]
    indexed = write_dataset(
        [list(range(first, first + 64)) for first in range(FIRST, FIRST + 3968, 64)]
    )
    runs = {}
    for ngram in (1, 2):
        objective = RobertaObjective(mask_probability=0.07, whole_words=True, longest_ngram=ngram)
        dataset = build_dataset(PretrainingData(objective, 66), indexed, tokenizer)
        asked = [np.flatnonzero(dataset[number]["labels"] != -100) for number in range(600)]
        assert all(
            (places[::2] % 2 == 1).all() and (np.diff(places)[::2] == 1).all() for places in asked
        )
        assert {len(places) for places in asked} <= {2, 4}
        runs[ngram] = (
            sum(len(places) == 4 and places[-1] - places[0] == 3 for places in asked) / 600
        )
    assert runs[1] < 0.1 < 0.25 < runs[2]


def test_the_shares_of_glm_are_settings(write_dataset):
    documents = [[*range(first, first + 299), PAD] for first in range(FIRST, FIRST + 40 * 300, 300)]
    indexed, tokenizer = write_dataset(documents), Numbers(FIRST + 40 * 300)

    def samples(**settings) -> list[dict[str, np.ndarray]]:
        dataset = build_dataset(
            PretrainingData(GLMObjective(vocabulary="bert", **settings), 96), indexed, tokenizer
        )
        return [dataset[number] for number in range(300)]

    def kinds(found: list[dict[str, np.ndarray]]) -> set[int]:
        return {
            mask for mask in (MASK, gmask, smask) for sample in found if mask in sample["input_ids"]
        }

    sop, _, gmask, smask, dblock = range(FIRST + 12000, FIRST + 12005)
    hidden = samples(token=1.0, sentence=0.0, block_mask_probability=0.3)
    assert kinds(hidden) == {MASK}
    generated = [
        token
        for s in hidden
        for token in s["input_ids"][int(s["attention_mask"]) :].tolist()
        if token != sop
    ]
    is_share(generated.count(dblock), len(generated), 0.3)
    assert kinds(samples(token=0.0, sentence=1.0)) == {smask}
    assert kinds(samples(token=0.0, sentence=0.0)) == {gmask}
    assert all(
        (s["input_ids"] == sop).sum() == (s["input_ids"] == MASK).sum() == 1
        for s in samples(single_span=1.0)
    )
    texts = [
        sum(1 for token in s["input_ids"] if FIRST <= token < sop)
        for s in samples(token=1.0, sentence=0.0, short=1.0)
    ]
    assert min(texts) < 40
    assert np.mean(texts) < 75
    more = samples(token=1.0, sentence=0.0, mask_probability=0.4)
    assert all((s["labels"] != -100).sum() - (s["input_ids"] == sop).sum() >= 30 for s in more)


@pytest.mark.parametrize("name", objective_names())
def test_samples_depend_on_seed_and_number_alone(name, write_dataset):
    kind = find_objective(name)
    documents = [[*range(first, first + 99), PAD] for first in range(FIRST, FIRST + 40 * 100, 100)]
    indexed = write_dataset(
        [[part[:50], part[50:]] for part in documents] if kind.split_sentences else documents
    )
    objective = kind(**({"vocabulary": "bert"} if name == "glm" else {}))

    def numbers(dataset) -> list[list[int]]:
        return [np.asarray(dataset[number]["input_ids"]).tolist() for number in (7, 0, 100, 33)]

    def build(seed: int):
        return build_dataset(
            PretrainingData(objective, 96, seed=seed), indexed, Numbers(FIRST + 4000)
        )

    dataset = build(3)
    first = numbers(dataset)
    assert len({tuple(sample) for sample in first}) == 4
    assert (
        first
        == numbers(dataset)
        == numbers(build(3))
        == numbers(pickle.loads(pickle.dumps(dataset)))
    )
    assert all(a != b for a, b in zip(first, numbers(build(4)), strict=True))
    assert dataset.tokens_per_epoch == indexed.num_tokens
    assert indexed.num_tokens / 120 <= dataset.samples_per_epoch <= indexed.num_tokens / 48
    with pytest.raises(IndexError, match="no end"):
        dataset[-1]
