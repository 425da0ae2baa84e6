"""What pre-training is given: a tokenizer, a training corpus and a held-out one."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from every_case import by_turns

from shardzoo.cli.data import main
from shardzoo.data import (
    IndexedDataset,
    PrepareOptions,
    Vocabulary,
    add_sentinels,
    load_tokenizer,
    merge_datasets,
    parse_mixture,
    prepare_corpora,
    prepare_corpus,
    prepare_dataset,
    split_sentences,
    target_entropy,
    token_counts,
    train_tokenizer,
    unigram_entropy,
)
from shardzoo.data.indexed.meta import CorpusMeta, read_meta
from shardzoo.data.tokenizers.training import TOKENIZER_KINDS


def documents(prefix, tokenizer) -> list[str]:
    dataset = IndexedDataset(prefix)
    return [
        tokenizer.decode(dataset.document(i)[:-1].tolist()) for i in range(dataset.num_documents)
    ]


@pytest.fixture(scope="module")
def corpus(jsonl, tmp_path_factory):
    return prepare_corpus(
        jsonl, tmp_path_factory.mktemp("prepared"), vocab_size=400, held_out_fraction=0.1, seed=5
    )


def test_every_document_is_on_one_side(corpus, texts):
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    train, valid = (
        documents(corpus.train_prefix, tokenizer),
        documents(corpus.valid_prefix, tokenizer),
    )
    assert sorted(train + valid) == sorted(texts)
    assert len(valid) == 20
    assert IndexedDataset(corpus.train_prefix).document(0)[-1] == corpus.eos_token_id


def test_the_choice_follows_the_seed_alone(jsonl, corpus, tmp_path):
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    valid = documents(corpus.valid_prefix, tokenizer)
    same = prepare_corpus(jsonl, tmp_path / "a", vocab_size=400, held_out_fraction=0.1, seed=5)
    other = prepare_corpus(jsonl, tmp_path / "b", vocab_size=400, held_out_fraction=0.1, seed=6)
    assert (
        same.valid_prefix.with_suffix(".bin").read_bytes()
        == corpus.valid_prefix.with_suffix(".bin").read_bytes()
    )
    assert documents(other.valid_prefix, load_tokenizer(other.tokenizer_dir)) != valid


def test_a_sentencepiece_tokenizer(jsonl, texts, tmp_path):
    corpus = prepare_corpus(jsonl, tmp_path, vocab_size=300, tokenizer="sentencepiece")
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    assert tokenizer.vocab_size == corpus.vocab_size == 300 + 100  # the sentinels
    train, valid = (
        documents(corpus.train_prefix, tokenizer),
        documents(corpus.valid_prefix, tokenizer),
    )
    assert sorted(train + valid) == sorted(texts)
    assert prepare_corpus(jsonl, tmp_path, vocab_size=300, tokenizer="sentencepiece") == corpus
    assert prepare_corpus(jsonl, tmp_path, vocab_size=300).eos_token_id == 0 != corpus.eos_token_id


def test_equal_documents_fall_on_the_same_side(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(
            f"text number {number % 6} of six, written ten times over"
        )
    corpus = prepare_corpus(folder, tmp_path / "out", vocab_size=300, held_out_fraction=0.3)
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    train, valid = (
        documents(corpus.train_prefix, tokenizer),
        documents(corpus.valid_prefix, tokenizer),
    )
    assert set(train).isdisjoint(valid)
    assert (len(train), len(valid)) == (40, 20)


def test_transformers_loads_the_tokenizer(corpus, texts):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(corpus.tokenizer_dir)
    mine = load_tokenizer(corpus.tokenizer_dir)
    assert len(reference) == corpus.vocab_size == mine.vocab_size
    assert (
        reference.eos_token_id
        == reference.bos_token_id
        == reference.unk_token_id
        == corpus.eos_token_id
    )
    for text in [*texts[:20], "naïve — 中文 \t\n  spaces \U0001f600 \0"]:
        assert reference(text).input_ids == mine.encode(text)
        assert reference.decode(mine.encode(text)) == text


def test_a_second_call_finds_the_work_done(jsonl, corpus, monkeypatch):
    monkeypatch.setattr("shardzoo.data.text.corpus.train_tokenizer", None)
    folder = corpus.tokenizer_dir.parent
    assert prepare_corpus(jsonl, folder, vocab_size=400, held_out_fraction=0.1, seed=5) == corpus


def test_a_damaged_result_is_made_again(jsonl, tmp_path):
    arguments = {"vocab_size": 300, "held_out_fraction": 0.1}
    corpus = prepare_corpus(jsonl, tmp_path, **arguments)
    tokens = corpus.train_prefix.with_suffix(".bin")
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:100])
    prepare_corpus(jsonl, tmp_path, **arguments)
    assert tokens.read_bytes() == whole


def test_a_prepared_pair_is_taken_with_the_tokenizer_beside_it(corpus, tmp_path):
    assert prepare_corpus(corpus.train_prefix, tmp_path / "x").valid_prefix == corpus.valid_prefix
    for suffix in (".bin", ".idx"):
        shutil.copy(corpus.train_prefix.with_suffix(suffix), tmp_path / f"mine{suffix}")
    with pytest.raises(ValueError, match=r"no tokenizer beside .*, or name one by --tokenizer$"):
        prepare_corpus(tmp_path / "mine", tmp_path / "out")
    shutil.copytree(corpus.tokenizer_dir, tmp_path / "mine_tokenizer")
    taken = prepare_corpus(tmp_path / "mine.idx", tmp_path / "out", held_out_fraction=0.25)
    parts = [IndexedDataset(taken.train_prefix), IndexedDataset(taken.valid_prefix)]
    assert [part.num_documents for part in parts] == [135, 45]
    assert taken.vocab_size == corpus.vocab_size
    before = taken.train_prefix.with_suffix(".idx").stat().st_mtime_ns
    assert prepare_corpus(tmp_path / "mine", tmp_path / "out", held_out_fraction=0.25) == taken
    assert taken.train_prefix.with_suffix(".idx").stat().st_mtime_ns == before


def test_a_tokenizer_of_another_corpus_is_refused(corpus, tmp_path, write_dataset):
    dataset = write_dataset([[1, corpus.vocab_size], [2]])
    shutil.copytree(corpus.tokenizer_dir, tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="use the tokenizer that the corpus") as error:
        prepare_corpus(dataset.prefix, tmp_path / "out")
    for name in (str(dataset.prefix), str(tmp_path / "tokenizer"), f"token id {corpus.vocab_size}"):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (None, "does not exist"),
        ({}, "holds no text"),
        ({"a.txt": "alone"}, "1 distinct document"),
        ({"a.txt": " ", "b.txt": "\n"}, "no document with text"),
    ],
)
def test_what_cannot_be_prepared_is_said(write, reason, tmp_path):
    if write is not None:
        (tmp_path / "in").mkdir()
        for name, text in write.items():
            (tmp_path / "in" / name).write_text(text)
    with pytest.raises(ValueError, match=reason):
        prepare_corpus(tmp_path / "in", tmp_path / "out", vocab_size=300)


@pytest.mark.parametrize(
    ("name", "value"), [("held_out_fraction", 0), ("held_out_fraction", 1), ("vocab_size", 100)]
)
def test_impossible_settings_are_named(name, value, jsonl, tmp_path):
    with pytest.raises(ValueError, match=str(value)):
        prepare_corpus(jsonl, tmp_path, **{name: value})


def test_bad_records_are_counted(tmp_path):
    lines = [json.dumps({"text": f"document {i}"}) for i in range(9)]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, "{"]))
    corpus = prepare_corpus(tmp_path / "x.jsonl", tmp_path / "out", vocab_size=300)
    assert corpus.bad_records == 1
    assert "record 10" in corpus.first_bad[0]


def test_unigram_entropy_is_that_of_the_counts(write_dataset):
    tokens = np.random.default_rng(0).geometric(0.05, 5000)
    entropy = -sum(n / 5000 * math.log(n / 5000) for n in Counter(tokens.tolist()).values())
    assert unigram_entropy(write_dataset([tokens[:2000], tokens[2000:]])) == pytest.approx(
        entropy, rel=1e-12
    )
    assert unigram_entropy(write_dataset([[5] * 10])) == 0
    with pytest.raises(ValueError, match="holds no tokens"):
        unigram_entropy(write_dataset([[]]))


def test_target_entropy_is_that_of_an_objectives_targets():
    labels = [-100, 4, -100, 4, 5, 5, -100, 4]
    masked = {"input_ids": [9] * 8, "labels": labels}
    of_five = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    assert target_entropy([masked]) == pytest.approx(of_five)
    assert target_entropy(
        [{**masked, "labels": labels[:4]}, {**masked, "labels": labels[4:]}]
    ) == pytest.approx(of_five)
    half = [{**masked, "next_sentence_label": np.array(number)} for number in (0, 1)]
    assert target_entropy(half) == pytest.approx(of_five + math.log(2))
    causal = {"input_ids": np.array([8, 4, 4, 5, 4, 5]), "labels": np.array([8, 4, 4, 5, 4, 5])}
    assert target_entropy([causal]) == pytest.approx(of_five)  # the first label is no target
    for nothing in ([], [{"input_ids": [3, 4], "labels": [-100, -100]}]):
        with pytest.raises(ValueError, match="no target tokens"):
            target_entropy(nothing)


END = {
    "bpe": "<|endoftext|>",
    "roberta-bpe": "</s>",
    "wordpiece": "[SEP]",
    "sentencepiece": "</s>",
    "unigram": "</s>",
    "bytes": "</s>",
    "glm-bpe": "<|endoftext|>",
}


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize("split", by_turns([False, True], 3))
def test_documents_end_as_their_tokenizer_says_but_sentences_do_not(
    kind, split, jsonl, texts, tmp_path
):
    corpus = prepare_corpus(jsonl, tmp_path, vocab_size=300, tokenizer=kind, split_sentences=split)
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    end = None if split else tokenizer.token_to_id(END[kind])
    assert corpus.eos_token_id == end
    meta = CorpusMeta(Vocabulary.from_tokenizer(tokenizer), end, split)
    assert json.loads((tmp_path / "train.meta.json").read_text()) == {
        "vocabulary": {"size": tokenizer.vocab_size, "sha256": meta.vocabulary.sha256},
        "end_token": end,
        "split_sentences": split,
    }
    found = []
    for prefix in (corpus.train_prefix, corpus.valid_prefix):
        dataset = IndexedDataset(prefix)
        assert dataset.meta == read_meta(prefix) == meta
        marks = dataset.document_indices
        found += [
            [dataset[i].tolist() for i in range(*marks[n : n + 2])]
            for n in range(dataset.num_documents)
        ]
    ended = [] if end is None else [end]
    parts = [split_sentences(text) if split else [text] for text in texts]
    assert sorted(found) == sorted(
        [tokenizer.encode(part) + ended for part in document] for document in parts
    )
    if split:
        assert max(map(len, found)) > 2
    assert (
        prepare_corpus(jsonl, tmp_path, vocab_size=300, tokenizer=kind, split_sentences=split)
        == corpus
    )
    assert (
        prepare_corpus(jsonl, tmp_path, vocab_size=300, tokenizer=kind, split_sentences=not split)
        != corpus
    )


def test_a_given_tokenizer_is_used_as_it_is(jsonl, texts, tokenizer_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("shardzoo.data.text.corpus.train_tokenizer", None)
    tokenizer = load_tokenizer(tokenizer_dir)
    add_sentinels(tokenizer)
    corpora = [
        prepare_corpus(jsonl, tmp_path / str(number), tokenizer=given, vocab_size=7)
        for number, given in enumerate(
            (tokenizer_dir, str(tokenizer_dir / "tokenizer.json"), tokenizer)
        )
    ]
    assert [corpus.vocab_size for corpus in corpora] == [345, 345, 445]
    assert len({corpus.train_prefix.with_suffix(".bin").read_bytes() for corpus in corpora}) == 1
    assert load_tokenizer(corpora[2].tokenizer_dir).tokens(445) == tokenizer.tokens(445)
    train, valid = (
        documents(prefix, tokenizer)
        for prefix in (corpora[2].train_prefix, corpora[2].valid_prefix)
    )
    assert sorted(train + valid) == sorted(texts)
    before = corpora[0].train_prefix.with_suffix(".idx").stat().st_mtime_ns
    assert prepare_corpus(jsonl, tmp_path / "0", tokenizer=tokenizer_dir) == corpora[0]
    assert corpora[0].train_prefix.with_suffix(".idx").stat().st_mtime_ns == before
    assert (
        prepare_corpus(jsonl, tmp_path / "0", tokenizer=tokenizer).vocab_size == 445
    )  # another one: made again
    with pytest.raises(
        ValueError,
        match=r"tokenizer nowhere is neither a file or folder nor one of the kinds .* bpe",
    ):
        prepare_corpus(jsonl, tmp_path, tokenizer="nowhere")


def test_a_pair_and_a_tokenizer_that_do_not_belong_together(corpus, jsonl, tmp_path):
    own = load_tokenizer(corpus.tokenizer_dir)
    add_sentinels(own)  # tokens behind the recorded ones do not matter
    assert (
        prepare_corpus(corpus.train_prefix, tmp_path / "a", tokenizer=own).vocab_size
        == own.vocab_size
    )
    other = prepare_corpus(jsonl, tmp_path / "other", vocab_size=500, tokenizer="roberta-bpe")
    for number, tokenizer in enumerate((other.tokenizer_dir, load_tokenizer(other.tokenizer_dir))):
        with pytest.raises(
            ValueError, match="another vocabulary"
        ) as error:  # all of the corpus' ids are in it
            prepare_corpus(corpus.train_prefix, tmp_path / f"b{number}", tokenizer=tokenizer)
        for name in (str(corpus.train_prefix), str(other.tokenizer_dir)):
            assert name in str(error.value)
    for suffix in ("bin", "idx", "meta.json"):
        shutil.copy(f"{corpus.train_prefix}.{suffix}", tmp_path / f"train.{suffix}")
        shutil.copy(f"{other.valid_prefix}.{suffix}", tmp_path / f"valid.{suffix}")
    with pytest.raises(ValueError, match=f"{tmp_path}/valid was prepared with another vocabulary"):
        prepare_corpus(tmp_path / "train", tmp_path / "c", tokenizer=own)


def test_sentence_pairs_need_a_pair_of_sentences(corpus, tmp_path):
    with pytest.raises(
        ValueError,
        match=rf"{corpus.train_prefix} holds one sequence per document.*--split-sentences",
    ):
        prepare_corpus(corpus.train_prefix, tmp_path, split_sentences=True)


def test_several_sources_are_one_corpus_and_pairs_are_not_among_them(corpus, texts, tmp_path):
    for number, part in enumerate((texts[:90], texts[90:])):
        (tmp_path / f"{number}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in part)
        )
    both = prepare_corpus(
        [tmp_path / "0.jsonl", tmp_path / "1.jsonl"], tmp_path / "out", vocab_size=300
    )
    tokenizer = load_tokenizer(both.tokenizer_dir)
    found = documents(both.train_prefix, tokenizer) + documents(both.valid_prefix, tokenizer)
    assert sorted(found) == sorted(texts)
    with pytest.raises(
        ValueError, match=rf"{corpus.train_prefix} is one of 2 sources and a .bin/.idx pair"
    ):
        prepare_corpus([tmp_path / "0.jsonl", corpus.train_prefix], tmp_path / "x")


def test_a_pair_of_another_tool_is_taken_and_what_is_odd_is_noted(
    tokenizer_dir, write_dataset, tmp_path
):
    dataset = write_dataset([[5, 6, 0], [7, 0], [8], [], [9, 0]])
    taken = prepare_corpus(dataset.prefix, tmp_path / "out", tokenizer=tokenizer_dir)
    assert taken.notes == (
        f"1 of the 4 documents of {dataset.prefix} do not end with token 0, '<|endoftext|>'",
    )
    assert taken.eos_token_id == 0
    assert IndexedDataset(taken.train_prefix).meta is None
    assert prepare_corpus(dataset.prefix, tmp_path / "out", tokenizer=tokenizer_dir) == taken
    assert (
        prepare_corpus(
            write_dataset([[5], [7]]).prefix, tmp_path / "o", tokenizer=tokenizer_dir
        ).eos_token_id
        is None
    )
    assert not prepare_corpus(
        write_dataset([[5, 0], [0]]).prefix, tmp_path / "p", tokenizer=tokenizer_dir
    ).notes


def test_the_record_is_carried_and_an_old_one_is_removed(
    jsonl, tokenizer_dir, write_dataset, tmp_path, capsys
):
    prepare_dataset(jsonl, tmp_path / "all", PrepareOptions(tokenizer_dir))
    meta = read_meta(tmp_path / "all")
    assert meta == CorpusMeta(Vocabulary.from_tokenizer(load_tokenizer(tokenizer_dir)), 0, False)
    assert (
        main(
            [
                "split",
                f"{tmp_path}/all",
                "--output",
                f"{tmp_path}/part",
                "--shares",
                "0.5",
                "0.25",
                "0.25",
            ]
        )
        == 0
    )
    assert {read_meta(tmp_path / f"part_{part}") for part in ("train", "valid", "test")} == {meta}
    merge_datasets([tmp_path / "part_train", tmp_path / "part_test"], tmp_path / "again")
    assert read_meta(tmp_path / "again") == meta
    plain = write_dataset([[1, 2]], np.uint16)
    merge_datasets([tmp_path / "again", plain.prefix], tmp_path / "again2")
    assert read_meta(tmp_path / "again2") is None
    merge_datasets([plain.prefix], tmp_path / "again")  # another corpus under the old name
    assert read_meta(tmp_path / "again") is None
    changed = {
        "vocabularies": CorpusMeta(Vocabulary(345, "0" * 64), 0),
        "end tokens": CorpusMeta(meta.vocabulary, None),
        "values of split_sentences": CorpusMeta(meta.vocabulary, 0, True),
    }
    for name, other in changed.items():
        other.write(tmp_path / "part_test")
        assert (
            main(
                [
                    "merge",
                    f"{tmp_path}/part_train",
                    f"{tmp_path}/part_test",
                    "--output",
                    f"{tmp_path}/m",
                ]
            )
            == 2
        )
        error = capsys.readouterr().err
        assert f"{tmp_path}/part_train and {tmp_path}/part_test have different {name}" in error
    assert not (tmp_path / "m.bin").exists()


HOSTILE = [
    "", "{", "[]", "null", "{}", '{"vocabulary": 3}', "NaN", "[" * 9999, '{"vocabulary": {"size": 5}}',
    *(json.dumps({"vocabulary": {"size": 9, "sha256": "a" * 64} | part, **rest}) for part, rest in (
        ({"size": -1}, {}), ({"size": True}, {}), ({"size": 1 << 40}, {}), ({"size": "9"}, {}), ({"size": 9.0}, {}),
        ({"sha256": "A" * 64}, {}), ({"sha256": "a" * 63}, {}), ({"sha256": 5}, {}), ({"sha256": None}, {}),
        ({}, {"end_token": 9}), ({}, {"end_token": -1}), ({}, {"end_token": "0"}), ({}, {"end_token": False}),
        ({}, {"split_sentences": 1}), ({}, {"split_sentences": None}),
    )),
    " " * (1 << 16) + "{}",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:70])
def test_a_damaged_record_is_refused(text, write_dataset, tmp_path, capsys):
    dataset = write_dataset([[1, 2], [3]])
    path = Path(f"{dataset.prefix}.meta.json")
    path.write_text(text)
    for door in (
        lambda: IndexedDataset(dataset.prefix),
        lambda: merge_datasets([dataset.prefix], tmp_path / "m"),
    ):
        with pytest.raises(ValueError, match=str(path)):
            door()
    assert main(["inspect", str(dataset.prefix)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_record_that_is_no_file_is_refused(write_dataset):
    dataset = write_dataset([[1, 2]])
    Path(f"{dataset.prefix}.meta.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a regular file"):
        IndexedDataset(dataset.prefix)


def test_the_largest_id_takes_no_memory(write_dataset, tokenizer_dir, capsys):
    largest = (1 << 31) - 1
    dataset = write_dataset([[0, 5, 5], [largest, 1 << 30]])
    tracemalloc.start()
    ids, counts = token_counts(dataset)
    assert (ids.tolist(), counts.tolist()) == ([0, 5, 1 << 30, largest], [1, 2, 1, 1])
    assert unigram_entropy(dataset) == pytest.approx(-(0.6 * math.log(0.2) + 0.4 * math.log(0.4)))
    assert main(["inspect", str(dataset.prefix)]) == 0
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert str(largest) in capsys.readouterr().out
    assert main(["inspect", str(dataset.prefix), "--tokenizer", str(tokenizer_dir)]) == 2
    error = capsys.readouterr().err
    assert all(
        name in error for name in (str(dataset.prefix), str(tokenizer_dir), f"token id {largest}")
    )
    with pytest.raises(ValueError, match=r"data\d holds -3; a token id is at least 0"):
        token_counts(write_dataset([[1, -3]]))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_counts_over_several_blocks_of_each_type(dtype, write_dataset, monkeypatch):
    monkeypatch.setattr("shardzoo.data.text.entropy.BLOCK_TOKENS", 100)
    tokens = np.random.default_rng(1).integers(0, 128, 950)
    ids, counts = token_counts(write_dataset([tokens], dtype))
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == Counter(tokens.tolist())


def test_inspect_shows_the_vocabulary_and_the_ends(corpus, capsys):
    assert (
        main(["inspect", str(corpus.train_prefix), "--tokenizer", str(corpus.tokenizer_dir)]) == 0
    )
    out = capsys.readouterr().out
    assert "345 tokens, sha256" in out
    assert "token 0: 180 of 180" in out


@pytest.fixture
def parts(texts, tmp_path) -> list[str]:
    """Two sources of different texts, and their shares."""
    for name, part in {"a": texts[:120], "b": [text.upper() for text in texts[120:]]}.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in part)
        )
    return [f"{tmp_path}/a.jsonl:0.7", f"{tmp_path}/b.jsonl:0.3"]


def test_a_mixture_has_one_tokenizer_and_two_sides_of_each_source(
    parts, texts, tmp_path, monkeypatch
):
    seen: list[str] = []

    def train(kind, documents, vocab_size, folder):
        seen.extend(documents)
        return train_tokenizer(kind, seen, vocab_size, folder)

    monkeypatch.setattr("shardzoo.data.text.corpus.train_tokenizer", train)
    arguments = {"vocab_size": 320, "tokenizer": "roberta-bpe", "held_out_fraction": 0.1}
    corpora = prepare_corpora(parse_mixture(parts), tmp_path / "out", **arguments)
    tokenizer = load_tokenizer(corpora[0].tokenizer_dir)
    assert load_tokenizer(corpora[1].tokenizer_dir).tokens(320) == tokenizer.tokens(320)
    sides = [
        [documents(p, tokenizer) for p in (corpus.train_prefix, corpus.valid_prefix)]
        for corpus in corpora
    ]
    assert [[len(side) for side in both] for both in sides] == [[108, 12], [72, 8]]
    assert sorted(sides[0][0] + sides[0][1]) == sorted(texts[:120])
    assert sorted(sides[1][0] + sides[1][1]) == sorted(text.upper() for text in texts[120:])
    assert sorted(seen) == sorted(sides[0][0] + sides[1][0])  # nothing that is held out
    monkeypatch.setattr("shardzoo.data.text.corpus.train_tokenizer", None)
    other_shares = parse_mixture([part.replace("0.7", "2") for part in parts])
    before = corpora[1].train_prefix.with_suffix(".idx").stat().st_mtime_ns
    assert prepare_corpora(other_shares, tmp_path / "out", **arguments) == corpora
    assert corpora[1].train_prefix.with_suffix(".idx").stat().st_mtime_ns == before
    with pytest.raises(TypeError):  # a changed source: trained again
        prepare_corpora(parse_mixture(parts[::-1]), tmp_path / "out", **arguments)


def test_the_tokenizer_of_a_mixture_sees_as_much_of_each_source(
    parts, texts, tmp_path, monkeypatch
):
    seen: list[str] = []
    monkeypatch.setattr("shardzoo.data.text.corpus.TOKENIZER_TEXT_BYTES", 12_000)
    monkeypatch.setattr(
        "shardzoo.data.text.corpus.train_tokenizer",
        lambda kind, documents, *rest: seen.extend(documents) or train_tokenizer(kind, seen, *rest),
    )
    prepare_corpora(parse_mixture(parts), tmp_path / "out", vocab_size=300)
    loud = sum(len(text) for text in seen if text.isupper())
    assert loud == pytest.approx(6000, rel=0.2)
    assert sum(map(len, seen)) - loud == pytest.approx(6000, rel=0.2)


def test_a_pair_brings_its_tokenizer_to_a_mixture(corpus, parts, tmp_path):
    mixture = parse_mixture([parts[0], f"{corpus.train_prefix}:1"])
    first, second = prepare_corpora(mixture, tmp_path / "out", vocab_size=300)
    assert second.train_prefix == corpus.train_prefix
    assert IndexedDataset(first.train_prefix).meta == IndexedDataset(corpus.train_prefix).meta
    other = prepare_corpus(f"{tmp_path}/b.jsonl", tmp_path / "other", vocab_size=300)
    mixture = parse_mixture([f"{corpus.train_prefix}:1", f"{other.train_prefix}:1"])
    with pytest.raises(ValueError, match="another vocabulary") as error:
        prepare_corpora(mixture, tmp_path / "out2")
    assert all(str(name) in str(error.value) for name in (other.train_prefix, corpus.tokenizer_dir))


def test_a_mixture_of_one_is_its_source(jsonl, tmp_path):
    (one,) = prepare_corpora(parse_mixture([f"{jsonl}:3"]), tmp_path / "a", vocab_size=300)
    assert one.train_prefix == tmp_path / "a/train"
    same = prepare_corpus(jsonl, tmp_path / "b", vocab_size=300)
    for suffix in (".bin", ".idx", ".meta.json"):
        assert (
            Path(f"{one.train_prefix}{suffix}").read_bytes()
            == Path(f"{same.train_prefix}{suffix}").read_bytes()
        )
    with pytest.raises(ValueError, match="held_out_fraction is 2"):
        prepare_corpora(parse_mixture([f"{jsonl}:3"]), tmp_path / "a", held_out_fraction=2)
