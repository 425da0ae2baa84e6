"""Streams of text for every objective: each token once per pass, whatever the ranks, workers and stops."""

from __future__ import annotations

import json
import pickle
import threading
import tracemalloc
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pytest
from every_case import by_turns, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from number_texts import Numbers, Plain

from shardzoo.data import (
    BlockStream,
    GPTObjective,
    IndexedDataset,
    IndexedDatasetWriter,
    IterableRecords,
    NextSentenceObjective,
    PretrainingData,
    ResumableStream,
    Share,
    TextStream,
    build_dataset,
    documents_in_memory,
    load_tokenizer,
    train_sentencepiece,
    train_wordpiece,
)
from shardzoo.data.text.corpus import hash_document


def documents(count=40, seed=0):
    """Documents of different lengths, no token of which is in another."""
    lengths = np.random.default_rng(seed).integers(1, 30, count)
    ends = np.cumsum(lengths) + 1
    return [
        " ".join(map(str, range(end - n, end)))
        for n, end in zip(lengths.tolist(), ends.tolist(), strict=True)
    ]


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch):
    monkeypatch.setattr("shardzoo.data.loading.blocks.BATCH_CHARACTERS", 200)


def stream(
    texts=None, rank=0, world=1, batch=1, length=7, objective=None, **options
) -> BlockStream:
    config = PretrainingData(objective or Plain(), length, micro_batch_size=batch, padded=False)
    records = IterableRecords.from_iterable(documents() if texts is None else texts)
    return BlockStream(
        records, Numbers(), config, rank=rank, world_size=world, **{"block_tokens": 90, **options}
    )


def rows(batch) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batch["input_ids"].tolist()]


def global_steps(streams, count=None):
    running = [iter(each) for each in streams]
    found = []
    while count is None or len(found) < count:
        batches = [next(each, None) for each in running]
        if batches[0] is None:
            assert all(batch is None for batch in batches)
            break
        found.append([row for batch in batches for row in rows(batch)])
    return found


@settings(max_examples=examples(25), deadline=None)
@given(
    block=st.sampled_from([1, 30, 90, 10_000]),
    length=st.integers(2, 11),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_each_token_is_trained_on_once_in_each_pass(block, length, epochs, seed):
    texts = documents(30, seed)
    total = sum(len(text.split()) for text in texts)
    steps = global_steps([stream(texts, length=length, block_tokens=block, epochs=epochs)])
    counts = Counter(token for step in steps for row in step for token in row)
    assert (
        sum(counts.values()) == total * epochs // length * length
    )  # less than a sample is left at the end
    assert set(counts) <= set(range(1, total + 1))
    assert max(counts.values()) <= epochs
    assert sum(epochs - counts[token] for token in range(1, total + 1)) == total * epochs % length


def test_gpt_predicts_each_token_once():
    texts = documents(60)
    total = sum(len(text.split()) for text in texts)
    steps = global_steps([stream(texts, length=9, objective="gpt", epochs=1, block_tokens=200)])
    predicted = Counter(token for step in steps for row in step for token in row[1:])
    assert sum(predicted.values()) == total // 8 * 8
    # The first token of a block has nothing before it. In its place the last sample predicts a first token.
    blocks = total // 200 + 1
    assert sum(count - 1 for count in predicted.values()) <= blocks


@pytest.mark.parametrize("world", by_turns([1, 2, 3], 2))
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_ranks_and_workers_change_nothing(world, workers):
    one = global_steps([stream(batch=6, epochs=2)])
    assert (
        global_steps(
            [
                stream(None, r, world, 6 // world, epochs=2, num_workers=workers)
                for r in range(world)
            ]
        )
        == one
    )
    assert len(one) > 20


@settings(max_examples=examples(25), deadline=None)
@given(
    stop=st.integers(0, 40), first=st.sampled_from([1, 2, 4]), second=st.sampled_from([1, 2, 4]),
    block=st.sampled_from([10, 90, 300]),
)  # fmt: skip
def test_stopping_anywhere_repeats_and_skips_nothing(stop, first, second, block):
    options = {"epochs": 2, "block_tokens": block}
    whole = global_steps([stream(batch=4, **options)])
    before = [stream(None, r, first, 4 // first, **options) for r in range(first)]
    seen = global_steps(before, stop)
    states = [json.loads(json.dumps(each.state_dict())) for each in before]
    assert all(state == states[0] for state in states)
    after = [stream(None, r, second, 4 // second, **options) for r in range(second)]
    for each in after:
        each.load_state_dict(states[-1])
    assert seen + global_steps(after) == whole


def mixture(rank=0, world=1, batch=1, shares=(0.7, 0.2, 0.1), **options) -> BlockStream:
    """Three streams of different lengths; a token tells by its thousands which it is from."""
    config = PretrainingData(Plain(), 4, micro_batch_size=batch, padded=False)
    streams = []
    for number, size in enumerate((30, 11, 5)):
        texts = [
            " ".join(str(1000 * number + int(word)) for word in text.split())
            for text in documents(size, number)
        ]
        streams.append(IterableRecords.from_iterable(texts))
    options = {"block_tokens": 120, **options}
    return BlockStream(
        streams, Numbers(), config, shares=shares, rank=rank, world_size=world, **options
    )


def test_streams_are_mixed_in_exact_shares():
    found = [row for step in global_steps([mixture()], 1000) for row in step]
    origins = [row[0] // 1000 for row in found]
    assert all(
        {token // 1000 for token in row} == {origin}
        for row, origin in zip(found, origins, strict=True)
    )
    for size in (10, 100, 1000):
        for start in range(0, 1000 - size + 1, 7):
            for number, share in enumerate((0.7, 0.2, 0.1)):
                assert abs(origins[start : start + size].count(number) - share * size) <= 4
    for number, size in enumerate((30, 11, 5)):  # each stream is read evenly
        counts = Counter(token for row in found for token in row if token // 1000 == number)
        assert len(counts) == sum(len(text.split()) for text in documents(size, number))
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("stop", by_turns([1, 17, 60], 3))
def test_mixtures_resume_with_other_ranks(stop):
    whole = global_steps([mixture(batch=6)], 80)
    assert global_steps([mixture(r, 3, 2, num_workers=2) for r in range(3)], 80) == whole
    first = [mixture(r, 2, 3) for r in range(2)]
    assert global_steps(first, stop) == whole[:stop]
    after = [mixture(r, 3, 2) for r in range(3)]
    for each in after:
        each.load_state_dict(json.loads(json.dumps(first[1].state_dict())))
    assert global_steps(after, 80 - stop) == whole[stop:]


def test_mixtures_that_are_not_possible_are_refused():
    with pytest.raises(ValueError, match="epochs is 2, but a mixture of streams is endless"):
        mixture(epochs=2)
    with pytest.raises(ValueError, match="3 datasets and 2 shares"):
        mixture(shares=(1, 2))
    with pytest.raises(
        ValueError, match=r"1 stream\(s\) in blocks of 120 tokens and cannot resume with 3"
    ):
        mixture().load_state_dict(stream(block_tokens=120).state_dict())


def test_an_endless_stream_begins_again_in_another_order():
    total = sum(len(text.split()) for text in documents())
    steps = global_steps([stream(batch=1, length=7)], 3 * total // 7)
    tokens = [token for step in steps for row in step for token in row]
    passes = [
        tokens[: total - 14],
        tokens[total : 2 * total - 14],
        tokens[2 * total : 3 * total - 14],
    ]
    assert len({tuple(each) for each in passes}) == 3
    counts = Counter(tokens)
    assert set(counts.values()) <= {2, 3}
    assert sum(counts.values()) == 3 * total // 7 * 7


def test_samples_are_those_of_the_block_on_disk(write_dataset):
    """The first block, written to files, gives the ordinary dataset's samples."""
    texts = documents()
    block = stream(texts, length=5, batch=3, block_tokens=10_000)
    tokens = [[int(word) for word in text.split()] for text in texts]
    total = sum(map(len, tokens)) // 5 * 5
    kept, left = [], total
    for document in tokens:
        kept += [document[:left]] if left else []
        left -= len(kept[-1]) if left else 0
    seed = int(np.random.SeedSequence([1234, 10, 0, 0]).generate_state(1)[0])
    ordinary = build_dataset(replace(block.config, seed=seed), write_dataset(kept), block.tokenizer)
    for number, step in zip(range(0, total // 5 - 3, 3), global_steps([block], 20), strict=False):
        assert step == [tuple(ordinary[number + k]["input_ids"].tolist()) for k in range(3)]


def test_a_corpus_in_memory_equals_one_in_files(write_dataset):
    texts = ["1 2 3", "4", "5 6 7 8"]
    disk = write_dataset([[1, 2, 3], [4], [5, 6, 7, 8]])
    for memory in (made := documents_in_memory(texts, Numbers()), pickle.loads(pickle.dumps(made))):
        assert isinstance(memory, IndexedDataset)
        assert (len(memory), memory.num_documents, memory.num_tokens) == (3, 3, 8)
        for number in range(3):
            assert (
                memory[number].tolist() == memory.document(number).tolist() == disk[number].tolist()
            )
            assert memory.token_range(number) == disk.token_range(number)
        assert memory.document_lengths().tolist() == disk.document_lengths().tolist() == [3, 1, 4]
        assert memory.sizes.tolist() == disk.sizes.tolist()
        assert memory.document_indices.tolist() == disk.document_indices.tolist()


def test_sentences_are_sequences_of_their_document(texts, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    memory = documents_in_memory(texts[:9], tokenizer, split_sentences=True)
    assert memory.num_documents == 9 < len(memory)
    for number, text in enumerate(texts[:9]):
        first, last = memory.document_indices[number : number + 2]
        assert tokenizer.decode(memory.document(number).tolist()) == text
        assert last - first == text.count(".")


@pytest.fixture(scope="module")
def tokenizers(texts, tmp_path_factory, tokenizer_dir):
    folder = tmp_path_factory.mktemp("tokenizers")
    train_wordpiece(iter(texts), 300, folder / "wordpiece")
    train_sentencepiece(iter(texts), 300, folder / "sentencepiece")
    return {name: folder / name for name in ("wordpiece", "sentencepiece")} | {"bpe": tokenizer_dir}


OBJECTIVES = {
    "gpt": "bpe", "separate gpt": "bpe", "t5": "sentencepiece", "prefix-lm": "sentencepiece",
    "bert-nsp": "wordpiece", "bert-sop": "wordpiece",
    "roberta": "wordpiece", "glm": "bpe", "ul2": "sentencepiece",
}  # fmt: skip


@pytest.mark.parametrize("objective", by_turns(OBJECTIVES, 3))
def test_every_objective_streams(objective, tokenizers, texts):
    if objective == "separate gpt":
        tokenizer = load_tokenizer(tokenizers["bpe"])
        chosen = GPTObjective(separate_documents=True)
    elif objective == "glm":
        from shardzoo.data import GLMObjective

        tokenizer = load_tokenizer(tokenizers["bpe"])
        chosen = (
            GLMObjective(vocabulary="chinese") if hasattr(GLMObjective, "vocabulary") else objective
        )
    else:
        tokenizer, chosen = load_tokenizer(tokenizers[OBJECTIVES[objective]]), objective
    config = PretrainingData(chosen, 64, micro_batch_size=4)

    def make(rank=0, world=1):
        own = replace(config, micro_batch_size=4 // world)
        return BlockStream(
            IterableRecords.from_iterable(texts),
            tokenizer,
            own,
            rank=rank,
            world_size=world,
            block_tokens=2000,
            epochs=2,
        )

    whole = [json.dumps({k: v.tolist() for k, v in batch.items()}) for batch in make()]
    assert len(whole) > 10
    assert len(set(whole)) == len(whole)
    if objective == "separate gpt":
        assert any(
            "seq_idx" in batch and max(map(max, json.loads(batch)["seq_idx"])) for batch in whole
        )
    first = make()
    seen = [next(batches) for batches in [iter(first)] for _ in range(7)]
    pair = [make(r, 2) for r in range(2)]
    for each in pair:
        each.load_state_dict(first.state_dict())
    following = [next(iter(each)) for each in pair]
    joined = {k: [*following[0][k].tolist(), *following[1][k].tolist()] for k in following[0]}
    assert json.dumps(joined) == whole[len(seen)]


def test_pairs_come_from_every_document(tokenizers, texts):
    tokenizer = load_tokenizer(tokenizers["wordpiece"])
    config = PretrainingData(NextSentenceObjective(), 256, micro_batch_size=1)
    found = set()
    for batch in BlockStream(
        IterableRecords.from_iterable(texts), tokenizer, config, block_tokens=3000, epochs=1
    ):
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        text = tokenizer.decode(
            np.where(labels != -100, labels, ids).tolist(), skip_special_tokens=True
        )
        found |= {
            number
            for number in range(len(texts))
            if f"document {number}." in text.replace(" .", ".")
        }
    assert len(found) > 0.97 * len(texts)  # a segment that is too long may lose its first sentence


def test_held_out_documents_are_never_trained_on(jsonl, texts):
    source = TextStream(jsonl, held_out_fraction=0.2, seed=7)
    trained = [text for epoch in range(3) for text, _ in source.read(epoch, None)]
    held_out = source.beginning(10**9, held_out=True)
    by_rule = {
        text for text in texts if int.from_bytes(hash_document(text, 7), "big") < 0.2 * 2**64
    }
    assert set(held_out) == by_rule
    assert len(held_out) == len(by_rule) > 20
    assert Counter(trained) == {text: 3 for text in texts if text not in by_rule}
    part = source.beginning(500, held_out=True)
    assert 500 <= sum(map(len, part)) < 500 + max(map(len, texts))
    assert part == held_out[: len(part)]
    assert source.beginning(1) == trained[:1]


def test_the_sides_are_those_of_a_prepared_corpus(jsonl, texts, tmp_path):
    from shardzoo.data import prepare_corpus

    corpus = prepare_corpus(jsonl, tmp_path, vocab_size=300, held_out_fraction=0.2, seed=7)
    tokenizer, valid = load_tokenizer(corpus.tokenizer_dir), IndexedDataset(corpus.valid_prefix)
    prepared = {
        tokenizer.decode(valid.document(number)[:-1].tolist())
        for number in range(valid.num_documents)
    }
    streamed = set(TextStream(jsonl, held_out_fraction=0.2, seed=7).beginning(10**9, held_out=True))
    # Both have the documents with the smallest hashes: a prepared corpus a fixed number, a stream those below a limit.
    assert streamed <= prepared or prepared <= streamed
    assert abs(len(streamed) - len(prepared)) < 15


def rows_of(texts):
    return ({"text": text} for text in texts)


@pytest.mark.parametrize("kind", ["json", "generator", "files", "rows"])
def test_sources_of_every_kind_stream(kind, jsonl, texts, tmp_path):
    import datasets

    if kind == "json":
        source = datasets.load_dataset(
            "json", data_files=[str(jsonl)], split="train", streaming=True, cache_dir=str(tmp_path)
        ).shuffle(seed=1, buffer_size=10)
    elif kind == "generator":
        source = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"texts": texts})
    else:
        source = jsonl if kind == "files" else list(rows_of(texts))
    documents = TextStream(source, held_out_fraction=0)
    tokenizer = Numbers()
    tokenizer.encode_batch = lambda batch: [[texts.index(text)] for text in batch]

    def make(**options):
        config = PretrainingData(Plain(), 2, micro_batch_size=2, padded=False)
        return BlockStream(documents, tokenizer, config, block_tokens=60, epochs=2, **options)

    whole = global_steps([make()])
    counts = Counter(number for step in whole for row in step for number in row)
    assert counts == dict.fromkeys(range(200), 2)
    assert global_steps([make(num_workers=2)]) == whole
    for stop in (1, 30, 51, 70):
        first, after = make(), make()
        assert global_steps([first], stop) == whole[:stop]
        after.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert global_steps([after]) == whole[stop:]


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "the stream holds no documents to train on"),
        (["1 2 3"], {"epochs": 2}, "fewer tokens than a sample needs"),
        (["1 2 3"] * 9, {"objective": "bert-nsp"}, r"objective 'bert-nsp' needs a tokenizer with"),
        (["1 2 3"] * 9, {"objective": "gpt", "length": 1}, "sequence_length is 1"),
        (["1 2 3"], {"block_tokens": 0}, "block_tokens is 0"),
        (["1 2 3"], {"epochs": 0}, "epochs 0"),
    ],
)
def test_streams_without_a_sample_are_refused(texts, options, message):
    with pytest.raises(ValueError, match=message):
        list(stream(texts, **options))


def test_documents_of_white_space_are_left_out():
    documents = TextStream(
        [{"text": " "}, {"text": ""}, {"text": "1"}, {"text": "\n"}], held_out_fraction=0
    )
    assert list(documents.read(0, None)) == [("1", 3)]


def test_a_tiny_source_is_read_until_it_makes_a_sample():
    steps = global_steps([stream(["1 2 3"], length=7)], 6)
    assert Counter(token for step in steps for row in step for token in row) == {
        1: 14,
        2: 14,
        3: 14,
    }


def test_documents_without_pairs_wait_for_the_next_epoch(tokenizers, texts):
    """The last block of an epoch has one document, of which no pair can be made."""
    tokenizer = load_tokenizer(tokenizers["wordpiece"])
    config = PretrainingData("bert-nsp", 64, micro_batch_size=1)
    long = " ".join(texts[:30])
    few = [*texts[30:33], long, texts[33]]
    made = BlockStream(
        IterableRecords.from_iterable(few), tokenizer, config, block_tokens=1200, epochs=2
    )
    assert len(list(made)) > 20
    with pytest.raises(ValueError, match="only one document of two or more sentences"):
        next(iter(BlockStream(IterableRecords.from_iterable([long]), tokenizer, config)))
    with pytest.raises(ValueError, match="no document of two sentences"):
        next(iter(BlockStream(IterableRecords.from_iterable(["one", "two"]), tokenizer, config)))


def test_bad_records_are_skipped_with_a_warning(tmp_path, texts):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\nno json\n" for text in texts[:5]))
    with pytest.warns(
        UserWarning, match=r"skipped .*bad.jsonl, record 2: not JSON.*; further bad records are"
    ) as seen:
        found = [text for text, _ in TextStream(path, held_out_fraction=0).read(0, None)]
    assert found == texts[:5]
    assert len(seen) == 1
    source = TextStream(
        [{"text": texts[0]}, {"text": 5}, {"text": None}, {"text": texts[1]}], held_out_fraction=0
    )
    with pytest.warns(UserWarning, match="record 2: the value of 'text' is int, not a string"):
        assert [text for text, _ in source.read(0, None)] == texts[:2]
    with pytest.raises(ValueError, match=r"has no column 'body'; its columns are 'text'"):
        list(TextStream([{"text": "a"}], text_key="body").read(0, None))


def test_sources_that_cannot_be_streamed_are_refused(tmp_path, monkeypatch, texts):
    def load_dataset(*names, **options):
        opened.append((names, options["split"], options["streaming"]))
        raise ConnectionError("no network")

    opened = []
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(
        ValueError,
        match="no-such/corpus is no file or folder, and cannot be streamed from the Hugg",
    ):
        TextStream("no-such/corpus")
    with pytest.raises(ValueError, match="no network"):
        TextStream("owner/name/part")
    assert opened == [
        (("no-such/corpus", None), "train", True),
        (("owner/name", "part"), "train", True),
    ]
    for name in ("corpus.jsonl", "/no/such/file", str(tmp_path / "corpus.txt"), "a/b/c/d", "../a"):
        with pytest.raises(ValueError, match="does not exist"):
            TextStream(name)
    assert len(opened) == 2
    with IndexedDatasetWriter(tmp_path / "pair", np.dtype(np.int32)):
        pass
    with pytest.raises(ValueError, match=r"pair is a .bin/.idx pair, which is tokenized already"):
        TextStream(tmp_path / "pair")
    with pytest.raises(ValueError, match="does not exist"):
        TextStream([tmp_path / "a.txt", tmp_path / "b.txt"])
    with pytest.raises(
        ValueError, match=r"held_out_fraction is 1; it must be at least 0 and less than 1"
    ):
        TextStream(None, held_out_fraction=1)
    with pytest.raises(
        ValueError, match="no document of the list is held out with held_out_fraction=0"
    ):
        TextStream([{"text": "a"}], held_out_fraction=0).beginning(1, held_out=True)


def test_a_stream_that_cannot_be_read_twice_or_is_no_text_is_refused(texts):
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts[:3]})})
    for source in (iter(texts), (text for text in texts), splits, 5):
        with pytest.raises(
            ValueError, match=f"a stream cannot read the type {type(source).__name__}: give paths"
        ):
            TextStream(source)


def test_a_run_does_not_resume_on_changed_files(tmp_path):
    def of_folder(folder, **options):
        config = PretrainingData(Plain(), 7, micro_batch_size=1, padded=False)
        return BlockStream(TextStream(folder, **options), Numbers(), config, block_tokens=90)

    for name in ("a", "b", "c"):
        (tmp_path / "texts").mkdir(exist_ok=True)
        lines = [json.dumps({"text": text}) + "\n" for text in documents()]
        (tmp_path / "texts" / f"{name}.jsonl").write_text("".join(lines))
    before = of_folder(tmp_path / "texts")
    next(iter(before))
    moved = (tmp_path / "texts").rename(tmp_path / "moved")
    of_folder(moved).load_state_dict(before.state_dict())  # the folder's name does not matter
    for options in ({"seed": 2}, {"held_out_fraction": 0.5}, {"text_key": "body"}):
        with pytest.raises(
            ValueError, match=r"the stream of .*moved is not the one that the run read"
        ):
            of_folder(moved, **options).load_state_dict(before.state_dict())
    (moved / "b.jsonl").write_text(lines[0])
    with pytest.raises(ValueError, match="its files"):
        of_folder(moved).load_state_dict(before.state_dict())


def test_states_of_other_streams_are_refused():
    made = stream()
    with pytest.raises(
        ValueError,
        match=r"1 stream\(s\) in blocks of 90 tokens and cannot resume with 1 in blocks of 300",
    ):
        stream(block_tokens=300).load_state_dict(made.state_dict())
    other = ResumableStream(
        IterableRecords.from_iterable([1]), lambda record, generator: record, Share(1)
    )
    with pytest.raises(ValueError, match="another kind of stream than a BlockStream"):
        made.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="another kind of stream than a ResumableStream"):
        other.load_state_dict(made.state_dict())
    with pytest.raises(ValueError, match="position in numbered samples"):
        made.load_state_dict({"consumed_samples": 3})


class Watched:
    """Records that tell how far they were read, and fail at a document if told so."""

    def __init__(self, texts, fails=None):
        self.texts, self.fails = texts, fails
        self.read_to, self.threads = threading.Event(), set()

    def read(self, epoch, cursor):
        for number in range(cursor or 0, len(self.texts)):
            if number == self.fails:
                raise OSError("the connection is lost")
            if number == 30:
                self.read_to.set()
            self.threads.add(threading.current_thread().name)
            yield self.texts[number], number + 1


def watched(**options):
    records = Watched(documents(), **options)
    config = PretrainingData(Plain(), 7, micro_batch_size=1, padded=False)
    return records, BlockStream(records, Numbers(), config, block_tokens=250, epochs=1)


def test_the_next_block_is_made_while_one_is_trained_on():
    records, made = watched()
    batches = iter(made)
    next(batches)
    assert records.read_to.wait(20)  # document 30 is not in the first block
    assert made.state_dict()["consumed_samples"] == 1
    assert threading.current_thread().name not in records.threads
    batches.close()


def test_a_source_that_fails_later_is_trained_on_until_then():
    _, made = watched(fails=25)
    found = []
    with pytest.raises(OSError, match="the connection is lost"):
        found.extend(rows(batch) for batch in made)
    assert found == global_steps([watched()[1]])[: len(found)] != []


def peak_of(count: int) -> int:
    """The peak of memory while a source of so many documents is streamed, in bytes.

    Blocks are so large that what else the interpreter holds at a time counts little.
    """
    words = " ".join(map(str, range(500)))
    records = IterableRecords(lambda epoch: (words for _ in range(count)))
    config = PretrainingData(Plain(), 500, micro_batch_size=8, padded=False)
    made = BlockStream(records, Numbers(), config, block_tokens=80_000, epochs=1)
    tracemalloc.start()
    try:
        assert sum(1 for _ in made) == count // 8
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.before_release
def test_memory_does_not_grow_with_the_source(monkeypatch):
    monkeypatch.setattr("shardzoo.data.loading.blocks.BATCH_CHARACTERS", 8_000)
    peak_of(400)  # imports
    assert peak_of(3_200) < 1.5 * peak_of(
        800
    )  # that all blocks stay would make it four times as much
