"""Fine-tuning data: pairs from every kind of file, samples, buckets and packs."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from every_case import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from shardzoo.data import (
    BlockDataset,
    LengthBuckets,
    PackedDataset,
    PadBatch,
    PromptDataset,
    ResumableLoader,
    Seq2SeqDataset,
    Share,
    SourceReport,
    iter_documents,
    load_chats,
    load_choices,
    load_labeled,
    load_labeled_words,
    load_pairs,
    load_questions,
    load_tokenizer,
    pack_lengths,
    skip_bad,
)
from shardzoo.finetuning.tasks import first_record

PAIRS = [("the of", "and to"), ("in that", "was"), ("with\tnot 中", "his but at this have")]


def test_every_kind_of_file_gives_the_same_pairs(tmp_path):
    import datasets

    lines = [json.dumps({"translation": {"s": s, "t": t}}) for s, t in PAIRS]
    (tmp_path / "t2t.json").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "flat.jsonl").write_text(
        "\n".join(json.dumps({"s": s, "t": t, "x": 1}) for s, t in PAIRS)
    )
    (tmp_path / "p.source").write_text("".join(f"{s}\n" for s, _ in PAIRS))
    (tmp_path / "p.target").write_text("".join(f"{t}\n" for _, t in PAIRS))
    columns = {"s": [s for s, _ in PAIRS], "t": [t for _, t in PAIRS]}
    flat = datasets.Dataset.from_dict(columns)
    flat.save_to_disk(str(tmp_path / "flat"))
    flat.to_parquet(str(tmp_path / "flat.parquet"))
    nested = datasets.Dataset.from_dict({"translation": [{"s": s, "t": t} for s, t in PAIRS]})
    nested.save_to_disk(str(tmp_path / "nested"))
    for name in (
        "t2t.json",
        "flat.jsonl",
        "p",
        "p.source",
        "p.target",
        "flat",
        "flat.parquet",
        "nested",
    ):
        assert list(load_pairs(tmp_path / name)) == PAIRS, name


MARK = b"\xef\xbb\xbf"
READERS = {
    "pairs": (load_pairs, {"s": "a", "t": "b"}),
    "labeled": (load_labeled, {"s": "a", "t": "b"}),
    "words": (load_labeled_words, {"s": ["a"], "t": ["b"]}),
    "choices": (load_choices, {"s": "a", "t": 0, "choices": ["b", "c"]}),
    "questions": (load_questions, {"question": "q", "context": "c", "answers": {"text": ["c"], "answer_start": [0]}}),
    "chats": (load_chats, {"messages": [{"role": "assistant", "content": "a"}]}),
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
def test_every_reader_knows_arrays_and_byte_order_marks(kind, tmp_path):
    load, record = READERS[kind]
    lines = b"\n".join([json.dumps(record).encode()] * 2)
    contents = {
        "lines.json": lines,
        "lines_with_mark.json": MARK + lines,
        "array.json": json.dumps([record, record], indent=1).encode(),
        "array_with_mark.json": MARK + json.dumps([record, record]).encode(),
    }
    wanted = None
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        found = list(load(tmp_path / name))
        assert len(found) == 2
        assert found == (wanted or found), name
        wanted = found
        assert first_record(tmp_path / name) == record
    for name, content in (("deep.json", b"[" * 100_000), ("bad.json", b"[{")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            load(tmp_path / name)


def test_lines_of_text_have_no_byte_order_mark(tmp_path):
    (tmp_path / "n.source").write_bytes(MARK + b"one\r\ntwo\xc2\x85\n")
    (tmp_path / "n.target").write_bytes(MARK + b"eins\nzwei")
    assert load_pairs(tmp_path / "n") == [("one", "eins"), ("two\x85", "zwei")]
    (tmp_path / "c.txt").write_bytes(MARK + b"-DOCSTART- -X- O\n\n[ X O\nEU X B\n")
    (sentence,) = load_labeled_words(tmp_path / "c.txt")
    assert (sentence.words, sentence.labels) == (("[", "EU"), ("O", "B"))


def test_a_corpus_may_be_an_array(tmp_path):
    records = [{"text": "one"}, {"text": 2}, {"text": "three"}]
    (tmp_path / "a.json").write_bytes(MARK + json.dumps(records, indent=1).encode())
    report = SourceReport()
    found = iter_documents(tmp_path / "a.json", on_bad=skip_bad, report=report)
    assert list(found) == ["one", "three"]
    assert report.first_bad == [
        f"{tmp_path}/a.json, record 2: the value of 'text' is int, not a string"
    ]
    (tmp_path / "a.json").write_bytes(b'[{"text": "one"}')
    with pytest.raises(ValueError, match=r"a\.json, record 1: .* is not one"):
        list(iter_documents(tmp_path / "a.json"))


def test_other_keys_and_a_prefix(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"translation": {"en": "a", "ro": "b"}}))
    assert list(
        load_pairs(tmp_path / "x.json", source_id="en", target_id="ro", prefix="fix: ")
    ) == [("fix: a", "b")]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"translation": {"s": "a"}}', "record 2: no key 't'; the keys are 's'"),
        (b'{"translation": [1]}', "record 2: a list instead of an object"),
        (b'{"translation": {"s": 1, "t": "a"}}', "record 2: the value of 's' is int"),
        (b"\xff", "record 2: .*utf-8"),
        (b"[" * 100_000, "record 2: nested too deeply"),
    ],
)
def test_bad_pairs_are_named(raw, reason, tmp_path):
    (tmp_path / "x.json").write_bytes(b'{"s": "a", "t": "b"}\n' + raw + b"\n")
    with pytest.raises(ValueError, match=reason):
        load_pairs(tmp_path / "x.json")


def test_sides_that_do_not_fit_are_named(tmp_path):
    (tmp_path / "p.source").write_text("a\nb\n")
    with pytest.raises(ValueError, match="one of them does not exist"):
        load_pairs(tmp_path / "p")
    (tmp_path / "p.target").write_text("a\n")
    with pytest.raises(ValueError, match=r"has 2 lines, but .* has 1"):
        load_pairs(tmp_path / "p")
    (tmp_path / "e.json").write_text("\n")
    with pytest.raises(ValueError, match="holds no records"):
        load_pairs(tmp_path / "e.json")
    with pytest.raises(ValueError, match="does not exist"):
        load_pairs(tmp_path / "missing")


def test_lengths_are_independent_and_each_side_ends_once(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    data = Seq2SeqDataset(
        [("the " * 50, "of " * 50), ("the", "")],
        tokenizer,
        max_source_length=10,
        max_target_length=4,
    )
    first, second = data[0], data[1]
    assert (len(first["input_ids"]), len(first["labels"])) == (10, 4)
    for sample in (first, second):
        for side in sample.values():
            assert (side == tokenizer.eos_token_id).sum() == 1
            assert side[-1] == tokenizer.eos_token_id
    assert first["input_ids"][:-1].tolist() == tokenizer.encode("the " * 50)[:9]
    assert second["labels"].tolist() == [tokenizer.eos_token_id]
    batch = PadBatch(7)([first, second])
    assert batch["input_ids"].shape == (2, 10)
    assert -100 not in batch["input_ids"]
    assert batch["labels"][1].tolist() == [0, -100, -100, -100]


def test_prompts_are_not_asked_for(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    data = PromptDataset(
        PAIRS, tokenizer, max_source_length=3, max_target_length=5, separator=" ->"
    )
    for index, (source, target) in enumerate(PAIRS):
        sample = data[index]
        prompt, answer = tokenizer.encode(source + " ->")[-3:], [*tokenizer.encode(target)[:4], 0]
        assert sample["input_ids"].tolist() == prompt + answer
        assert sample["labels"].tolist() == [-100] * len(prompt) + answer


def test_plain_text_in_blocks(tokenizer_dir, texts):
    tokenizer = load_tokenizer(tokenizer_dir)
    data = BlockDataset(texts[:20], tokenizer, 32)
    joined = [token for text in texts[:20] for token in [*tokenizer.encode(text), 0]]
    assert (
        np.concatenate([data[i]["labels"] for i in range(len(data))]).tolist()
        == joined[: 32 * len(data)]
    )
    assert len(data) == len(joined) // 32
    with pytest.raises(ValueError, match="fewer than one block of 1000"):
        BlockDataset(["a"], tokenizer, 1000)


@settings(max_examples=examples(60), deadline=None)
@given(
    size=st.integers(1, 70),
    batch=st.integers(1, 9),
    window=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_buckets_are_permutations(size, batch, window, seed):
    lengths = np.random.default_rng(seed).integers(1, 100, size)
    order = LengthBuckets(lengths.tolist(), batch, seed=seed, window=window)
    for epoch in range(3):
        assert sorted(order(epoch * size + place) for place in range(size)) == list(range(size))


def test_buckets_save_padding_on_any_number_of_ranks():
    lengths = np.random.default_rng(0).integers(1, 200, 1003).tolist()

    class Samples:
        def __getitem__(self, index):
            return {
                "input_ids": np.full(lengths[index], index),
                "labels": np.full(lengths[index], index),
            }

    def padding(world, order):
        padded = real = 0
        numbers = Counter()
        for rank in range(world):
            loader = ResumableLoader(
                Samples(), Share(8 // world, rank, world), total=2006, order=order
            )
            for batch in loader:
                padded += batch["input_ids"].numel()
                real += int(batch["attention_mask"].sum())
                numbers.update(batch["input_ids"][:, 0].tolist())
        assert sum(numbers.values()) == 2000
        return 1 - real / padded, numbers

    plain, _ = padding(1, LengthBuckets([1] * 1003, 8))  # equal lengths: a plain shuffle
    bucketed, one = padding(1, LengthBuckets(lengths, 8))
    assert plain > 0.4
    assert bucketed < 0.08
    assert padding(4, LengthBuckets(lengths, 8))[1] == one


@settings(max_examples=examples(100), deadline=None)
@given(lengths=st.lists(st.integers(0, 50), max_size=60))
def test_packs_hold_every_sample_once_and_are_full(lengths):
    groups = pack_lengths(lengths, 50)
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    sums = [sum(lengths[number] for number in group) for group in groups]
    assert all(total <= 50 for total in sums)
    assert sum(total <= 25 for total in sums) <= 1  # two half-empty packs would have been one


def test_packed_samples_stay_apart():
    class Samples:
        data = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]  # noqa: RUF012

        def __len__(self):
            return 4

        def __getitem__(self, index):
            values = np.array(self.data[index])
            return {"input_ids": values, "labels": values}

    packed = PackedDataset(Samples(), 5)
    assert len(packed) == 2
    sample = packed[0]
    assert sample["input_ids"].tolist() == [6, 7, 8, 9, 10]
    assert sample["labels"].tolist() == [-100, 7, 8, 9, -100]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3, 0]
    assert sample["segment_ids"].tolist() == [1, 1, 1, 1, 2]
    with pytest.raises(ValueError, match="sample 2 has 4 tokens, more than the capacity 3"):
        PackedDataset(Samples(), 3)
