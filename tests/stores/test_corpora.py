"""Texts, tokenizers and prepared pairs in object stores."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from shardzoo.cli.main import main
from shardzoo.data import (
    IndexedDataset,
    TextStream,
    load_tokenizer,
    parse_mixture,
    prepare_corpora,
    prepare_corpus,
    save_tokenizer,
)
from shardzoo.data.indexed import ranged_tokens
from shardzoo.data.text import sources
from shardzoo.data.text.documents import iter_documents
from shardzoo.files import working_copies
from shardzoo.files.object_store import list_objects, read_object, write_object
from shardzoo.files.working_copies import find_stand_in


@pytest.fixture(scope="module")
def lines() -> bytes:
    generator = random.Random(0)
    words = ["one", "two", "three", "four"]
    texts = (" ".join(generator.choices(words, k=generator.randrange(50))) for _ in range(800))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def ranged(monkeypatch):
    """Small files are read by ranges, too."""
    monkeypatch.setattr(sources, "LARGEST_FETCHED", 0)
    monkeypatch.setattr(working_copies, "STREAM_BLOCK", 1000)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(ranged_tokens, "BLOCK_BYTES", 512)
    monkeypatch.setattr(ranged_tokens, "MOST_BLOCKS", 2)


def test_texts_are_read_as_those_on_a_disk(bucket, lines, ranged, tmp_path):
    import pyarrow
    from pyarrow.parquet import write_table

    texts = [json.loads(line)["text"] for line in lines.splitlines()]
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.json").write_text(json.dumps([{"text": text} for text in texts[:9]]))
    (tmp_path / "c.txt").write_text("\n\n".join(texts[:50]))
    write_table(pyarrow.table({"text": texts}), tmp_path / "d.parquet", row_group_size=100)
    for path in tmp_path.iterdir():
        write_object(f"{bucket}/texts/{path.name}", path.read_bytes())
        assert list(iter_documents(f"{bucket}/texts/{path.name}")) == list(iter_documents(path))
    assert list(iter_documents(f"{bucket}/texts")) == list(iter_documents(tmp_path))
    mine = TextStream(f"{bucket}/texts/a.jsonl", held_out_fraction=0.1)
    theirs = TextStream(str(tmp_path / "a.jsonl"), held_out_fraction=0.1)
    assert mine.beginning(10_000, held_out=True) == theirs.beginning(10_000, held_out=True)


def test_pairs_are_prepared_and_read(memory_bucket, lines, ranged, tmp_path, capsys):
    write_object(f"{memory_bucket}/corpus.jsonl", lines)
    (tmp_path / "corpus.jsonl").write_bytes(lines)

    def run(place: str) -> None:
        words = ["data", "train-tokenizer", "--input", f"{place}/corpus.jsonl"]
        assert main([*words, "--output", f"{place}/tokenizer", "--vocab-size", "300"]) == 0
        words = ["data", "prepare", "--input", f"{place}/corpus.jsonl"]
        words += ["--tokenizer", f"{place}/tokenizer", "--output", f"{place}/pairs/all"]
        assert main(words) == 0
        words = ["data", "split", f"{place}/pairs/all", "--output", f"{place}/pairs/part"]
        assert main([*words, "--shares", "0.8", "0.1", "0.1"]) == 0
        words = ["data", "merge", f"{place}/pairs/part_train", f"{place}/pairs/part_test"]
        assert main([*words, "--output", f"{place}/pairs/merged"]) == 0

    run(str(tmp_path))
    run(memory_bucket)
    for folder in ("tokenizer", "pairs"):
        stored = list_objects(f"{memory_bucket}/{folder}")
        assert stored.keys() == {path.name for path in (tmp_path / folder).iterdir()}
        for name in stored:
            mine = read_object(f"{memory_bucket}/{folder}/{name}")
            theirs = (tmp_path / folder / name).read_bytes()
            if name.endswith(".meta.json"):  # It has a digest of the source's name.
                mine = {**json.loads(mine), "made_from": None}
                theirs = {**json.loads(theirs), "made_from": None}
            assert mine == theirs, name
    capsys.readouterr()
    assert main(["data", "inspect", f"{memory_bucket}/pairs/all"]) == 0

    here = IndexedDataset(tmp_path / "pairs" / "all")
    there = IndexedDataset(f"{memory_bucket}/pairs/all.bin")
    assert find_stand_in(there.prefix.with_name("all.bin")) is not None
    assert len(here.tokens) == len(there.tokens)
    np.testing.assert_array_equal(np.asarray(there.tokens), here.tokens)
    for number in (0, 5, len(here) - 1, -1):
        np.testing.assert_array_equal(there[number], here[number])
    np.testing.assert_array_equal(there.last_tokens(), here.last_tokens())


def test_corpora_are_prepared_by_a_call(memory_bucket, lines, tmp_path):
    write_object(f"{memory_bucket}/corpus.jsonl", lines)
    (tmp_path / "corpus.jsonl").write_bytes(lines)
    here = prepare_corpus(tmp_path / "corpus.jsonl", tmp_path / "corpus", vocab_size=300)
    url = f"{memory_bucket}/corpus"
    there = prepare_corpus(f"{memory_bucket}/corpus.jsonl", url, vocab_size=300)
    stored = list_objects(url)
    for part in ("train", "valid"):
        for ending in ("bin", "idx"):
            wanted = (tmp_path / "corpus" / f"{part}.{ending}").read_bytes()
            assert read_object(f"{url}/{part}.{ending}") == wanted
        tokens = np.asarray(IndexedDataset(f"{url}/{part}").tokens)
        np.testing.assert_array_equal(tokens, IndexedDataset(tmp_path / "corpus" / part).tokens)
    assert there.vocab_size == here.vocab_size
    assert len(IndexedDataset(there.train_prefix)) == len(IndexedDataset(here.train_prefix))

    # It is found again. Its tokenizer may be read, and written elsewhere.
    prepare_corpus(f"{memory_bucket}/corpus.jsonl", url, vocab_size=300)
    assert list_objects(url) == stored
    tokenizer = load_tokenizer(f"{url}/tokenizer")
    assert load_tokenizer(f"{url}/tokenizer/tokenizer.json").encode("one") == tokenizer.encode(
        "one"
    )
    save_tokenizer(tokenizer, f"{memory_bucket}/tokenizer")
    mixture = [(f"{memory_bucket}/corpus.jsonl", 0.5), (tmp_path / "corpus.jsonl", 0.5)]
    options = {"tokenizer": f"{memory_bucket}/tokenizer"}
    prepare_corpora(mixture, f"{memory_bucket}/mixture", **options)
    for part in ("part_0", "part_1"):
        found = IndexedDataset(f"{memory_bucket}/mixture/{part}/train")
        np.testing.assert_array_equal(
            np.asarray(found.tokens), IndexedDataset(here.train_prefix).tokens
        )


def test_a_pair_without_its_index_is_none(memory_bucket, lines, tmp_path):
    write_object(f"{memory_bucket}/corpus.jsonl", lines)
    words = ["data", "train-tokenizer", "--input", f"{memory_bucket}/corpus.jsonl"]
    assert main([*words, "--output", f"{memory_bucket}/tokenizer", "--vocab-size", "300"]) == 0
    assert load_tokenizer(working_copies.find_source(f"{memory_bucket}/tokenizer")).vocab_size
    write_object(f"{memory_bucket}/cut.bin", b"12")
    with pytest.raises(FileNotFoundError, match="an indexed dataset is a"):
        IndexedDataset(f"{memory_bucket}/cut")
    with pytest.raises(ValueError, match=f"there is nothing at {memory_bucket}/none"):
        list(iter_documents(f"{memory_bucket}/none"))


def test_urls_may_have_shares():
    mixture = parse_mixture(["s3://texts/a:0.25", "s3://texts/b:0.75"])
    assert [name for name, _ in mixture] == ["s3://texts/a", "s3://texts/b"]
    assert parse_mixture(["s3://texts/a"])[0][0] == "s3://texts/a"


def test_a_text_that_changes_is_refused(memory_bucket, lines, ranged):
    url = f"{memory_bucket}/corpus.jsonl"
    write_object(url, lines)
    documents = iter_documents(url)
    next(documents)
    write_object(url, lines)
    with pytest.raises(ValueError, match="changed while it was being read"):
        list(documents)
