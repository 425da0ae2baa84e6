"""What pre-training is given: a tokenizer, a training corpus and a held-out one."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter

import numpy as np
import pytest

from shardzoo.data import IndexedDataset, load_tokenizer, prepare_corpus, target_entropy, unigram_entropy


def documents(prefix, tokenizer) -> list[str]:
    dataset = IndexedDataset(prefix)
    return [tokenizer.decode(dataset.document(i)[:-1].tolist()) for i in range(dataset.num_documents)]


@pytest.fixture(scope="module")
def corpus(jsonl, tmp_path_factory):
    return prepare_corpus(jsonl, tmp_path_factory.mktemp("prepared"), vocab_size=400, held_out_fraction=0.1, seed=5)


def test_every_document_is_on_one_side(corpus, texts):
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    train, valid = documents(corpus.train_prefix, tokenizer), documents(corpus.valid_prefix, tokenizer)
    assert sorted(train + valid) == sorted(texts)
    assert len(valid) == 20
    assert IndexedDataset(corpus.train_prefix).document(0)[-1] == corpus.eos_token_id


def test_the_choice_follows_the_seed_alone(jsonl, corpus, tmp_path):
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    valid = documents(corpus.valid_prefix, tokenizer)
    same = prepare_corpus(jsonl, tmp_path / "a", vocab_size=400, held_out_fraction=0.1, seed=5)
    other = prepare_corpus(jsonl, tmp_path / "b", vocab_size=400, held_out_fraction=0.1, seed=6)
    assert same.valid_prefix.with_suffix(".bin").read_bytes() == corpus.valid_prefix.with_suffix(".bin").read_bytes()
    assert documents(other.valid_prefix, load_tokenizer(other.tokenizer_dir)) != valid


def test_a_sentencepiece_tokenizer(jsonl, texts, tmp_path):
    corpus = prepare_corpus(jsonl, tmp_path, vocab_size=300, tokenizer="sentencepiece")
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    assert tokenizer.vocab_size == corpus.vocab_size == 300 + 100  # the sentinels
    train, valid = documents(corpus.train_prefix, tokenizer), documents(corpus.valid_prefix, tokenizer)
    assert sorted(train + valid) == sorted(texts)
    assert prepare_corpus(jsonl, tmp_path, vocab_size=300, tokenizer="sentencepiece") == corpus
    assert prepare_corpus(jsonl, tmp_path, vocab_size=300).eos_token_id == 0 != corpus.eos_token_id


def test_equal_documents_fall_on_the_same_side(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"text number {number % 6} of six, written ten times over")
    corpus = prepare_corpus(folder, tmp_path / "out", vocab_size=300, held_out_fraction=0.3)
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    train, valid = documents(corpus.train_prefix, tokenizer), documents(corpus.valid_prefix, tokenizer)
    assert set(train).isdisjoint(valid)
    assert (len(train), len(valid)) == (40, 20)


def test_transformers_loads_the_tokenizer(corpus, texts):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(corpus.tokenizer_dir)
    mine = load_tokenizer(corpus.tokenizer_dir)
    assert len(reference) == corpus.vocab_size == mine.vocab_size
    assert reference.eos_token_id == reference.bos_token_id == reference.unk_token_id == corpus.eos_token_id
    for text in [*texts[:20], "naïve — 中文 \t\n  spaces \U0001f600 \0"]:
        assert reference(text).input_ids == mine.encode(text)
        assert reference.decode(mine.encode(text)) == text


def test_a_second_call_finds_the_work_done(jsonl, corpus, monkeypatch):
    monkeypatch.setattr("shardzoo.data.text.corpus.train_byte_level_bpe", None)
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
    with pytest.raises(ValueError, match="no tokenizer beside"):
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
    with pytest.raises(ValueError, match="use the tokenizer that the corpus"):
        prepare_corpus(dataset.prefix, tmp_path / "out")


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


@pytest.mark.parametrize(("name", "value"), [("held_out_fraction", 0), ("held_out_fraction", 1), ("vocab_size", 100)])
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
    assert unigram_entropy(write_dataset([tokens[:2000], tokens[2000:]])) == pytest.approx(entropy, rel=1e-12)
    assert unigram_entropy(write_dataset([[5] * 10])) == 0
    with pytest.raises(ValueError, match="holds no tokens"):
        unigram_entropy(write_dataset([[]]))


def test_target_entropy_is_that_of_an_objectives_targets():
    labels = [-100, 4, -100, 4, 5, 5, -100, 4]
    masked = {"input_ids": [9] * 8, "labels": labels}
    of_five = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    assert target_entropy([masked]) == pytest.approx(of_five)
    assert target_entropy([{**masked, "labels": labels[:4]}, {**masked, "labels": labels[4:]}]) == pytest.approx(
        of_five
    )
    half = [{**masked, "next_sentence_label": np.array(number)} for number in (0, 1)]
    assert target_entropy(half) == pytest.approx(of_five + math.log(2))
    causal = {"input_ids": np.array([8, 4, 4, 5, 4, 5]), "labels": np.array([8, 4, 4, 5, 4, 5])}
    assert target_entropy([causal]) == pytest.approx(of_five)  # the first label is no target
    for nothing in ([], [{"input_ids": [3, 4], "labels": [-100, -100]}]):
        with pytest.raises(ValueError, match="no target tokens"):
            target_entropy(nothing)
