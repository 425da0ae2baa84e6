"""Damaged and hostile tokenizer files: one ValueError that names the file, at every door, soon and in little memory.

Each attack is made on a folder of each kind of tokenizer, and tried at the zoo's own loader and at the one by way of
transformers.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from every_case import by_turns

from shardzoo.cli import main as cli
from shardzoo.data import load_tokenizer, train_byte_level_bpe, train_sentencepiece, train_wordpiece
from shardzoo.data.tokenizers.tokenizer import load_transformers_tokenizer

DOORS = {"own": load_tokenizer, "transformers": load_transformers_tokenizer}
SECONDS = 10
TEXT = "The house of words, aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"

FILES = {
    "bpe": (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    "sentencepiece": ("spiece.model", "tokenizer_config.json", "special_tokens_map.json"),
    "wordpiece": ("vocab.txt", "tokenizer_config.json", "added_tokens.json"),
    "gpt2": ("vocab.json", "merges.txt", "tokenizer_config.json"),
}
CASES = [(kind, name) for kind, names in FILES.items() for name in names]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, texts) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kinds")
    train_byte_level_bpe(texts, 300, root / "bpe")
    train_sentencepiece(texts, 300, root / "sentencepiece")
    train_wordpiece(texts, 200, root / "trained")
    model = {
        name: json.loads((root / name / "tokenizer.json").read_text())["model"]
        for name in ("bpe", "trained")
    }
    for name, values in {
        "wordpiece": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
        "gpt2": {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"},
    }.items():
        (root / name).mkdir()
        (root / name / "tokenizer_config.json").write_text(json.dumps(values))
    vocabulary = model["trained"]["vocab"]
    (root / "wordpiece/vocab.txt").write_text(
        "\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n"
    )
    (root / "gpt2/vocab.json").write_text(json.dumps(model["bpe"]["vocab"]))
    (root / "gpt2/merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(m) for m in model["bpe"]["merges"])
    )
    return {kind: root / kind for kind in FILES}


@pytest.fixture
def alarm():
    """Ends a test that waits for more than the limit."""

    def late(*_):
        raise TimeoutError(f"no answer in {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    yield lambda: signal.alarm(SECONDS)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def verdicts(folder: Path, alarm: Callable) -> list[str | None]:
    """Each door's message, None where it loads and encodes; fails for another exception, a hang or growth."""
    found = []
    for load in DOORS.values():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        alarm()
        try:
            tokenizer = load(folder)
            ids = tokenizer.encode(TEXT)
            tokenizer.decode(ids)
            found.append(None)
        except ValueError as error:
            found.append(str(error))
        signal.alarm(0)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10
    return found


def copy_of(folder: Path, tmp_path: Path, name: str) -> tuple[Path, Path]:
    copied = tmp_path / "attacked"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder, copied)
    return copied, copied / name


def assert_refused(folder: Path, alarm: Callable, *words: str) -> None:
    for message in verdicts(folder, alarm):
        assert message is not None
        assert "\n" not in message
        for word in (str(folder), *words):
            assert word in message


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)


NO_FILES = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link out of the folder": lambda path: path.symlink_to("/etc/hostname"),
    "20 GiB": sparse,
}


@pytest.mark.parametrize("attack", NO_FILES)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_what_is_no_file_of_the_folder(kind, name, attack, folders, tmp_path, alarm):
    folder, path = copy_of(folders[kind], tmp_path, name)
    path.unlink(missing_ok=True)
    NO_FILES[attack](path)
    assert_refused(folder, alarm, name)


JSON_ATTACKS = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "number": b"3",
    "string": b'"x"',
    "NaN": b'{"model_max_length": NaN}',
    "twice": b'{"eos_token": "a", "eos_token": "b"}',
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "no UTF-8": b'{"eos_token": "\xff\xe9"}',
    "UTF-16": '{"eos_token": "a"}'.encode("utf-16"),
    "binary": random.Random(0).randbytes(3000),
    "cut": b'{"eos_token": "a", ',
}


@pytest.mark.parametrize("attack", JSON_ATTACKS)
@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case[1].endswith(".json")])
def test_json_that_is_none(kind, name, attack, folders, tmp_path, alarm):
    folder, path = copy_of(folders[kind], tmp_path, name)
    path.write_bytes(JSON_ATTACKS[attack])
    assert_refused(folder, alarm, name)


WRONG = [None, True, -1, 2.5, "3", [], {}, [[]], {"a": {}}, 2**31, 2**32 - 1, 2**63, 2**64, 10**30]
ID_FILES = [("bpe", "tokenizer.json"), ("gpt2", "vocab.json"), ("gpt2", "added_tokens.json")]


@pytest.mark.parametrize("index", WRONG, ids=str)
@pytest.mark.parametrize(("kind", "name"), ID_FILES)
def test_ids_that_are_none_or_huge(kind, name, index, folders, tmp_path, alarm):
    """An id of 2**32 - 1 made the Rust library end the process as soon as its vocabulary was written."""
    folder, path = copy_of(folders[kind], tmp_path, name)
    values = json.loads(path.read_text()) if path.exists() else {}
    (values["model"]["vocab"] if name == "tokenizer.json" else values)["hostile"] = index
    path.write_text(json.dumps(values))
    assert_refused(folder, alarm, name, "hostile")


SETTINGS = ("extra_ids", "tokenizer_class", "model_max_length", "eos_token", "added_tokens_decoder")


@pytest.mark.parametrize(
    "value", by_turns([value for value in WRONG if value is not None], 2), ids=str
)
@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("kind", FILES)
def test_settings_of_other_types(kind, key, value, folders, tmp_path, alarm):
    """Some values fit; no door may do anything but load or refuse."""
    folder, path = copy_of(folders[kind], tmp_path, "tokenizer_config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    for message in verdicts(folder, alarm):
        assert message is None or str(folder) in message
    if key == "extra_ids" and value not in (True, -1) and not isinstance(value, int):
        assert_refused(folder, alarm, "tokenizer_config.json", "extra_ids")


PARTS = (
    "model",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "normalizer",
    "added_tokens",
    "truncation",
    "version",
)


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_parts_of_a_tokenizer_json(part, value, folders, tmp_path, alarm):
    folder, path = copy_of(folders["bpe"], tmp_path, "tokenizer.json")
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, part: value}))
    found = verdicts(folder, alarm)
    if isinstance(values[part], dict):
        for key in ("type", "vocab", "merges"):
            path.write_text(json.dumps({**values, part: {**values[part], key: value}}))
            found += verdicts(folder, alarm)
    assert all(message is None or str(folder) in message for message in found)


def test_a_pattern_that_never_ends(folders, tmp_path, alarm):
    """It is found when a text is encoded: the Rust library panics, which is no Exception in Python."""
    folder, path = copy_of(folders["bpe"], tmp_path, "tokenizer.json")
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": split}))
    tokenizer = load_tokenizer(folder)
    alarm()
    with pytest.raises(
        ValueError, match=r"tokenizer.json holds no readable tokenizer: .*retry-limit"
    ):
        tokenizer.encode(TEXT)


FLIPPED = [("bpe", "tokenizer.json"), ("bpe", "tokenizer_config.json"), ("sentencepiece", "spiece.model"),
           ("wordpiece", "vocab.txt"), ("gpt2", "vocab.json"), ("gpt2", "merges.txt")]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), FLIPPED)
def test_cut_and_flipped_bytes(kind, name, folders, tmp_path, alarm):
    raw = (folders[kind] / name).read_bytes()
    generator = random.Random(kind + name)
    for number in range(24):
        damaged = bytearray(raw[: generator.randrange(len(raw))] if number % 3 == 0 else raw)
        for _ in range(generator.choice((0, 1, 5, 50)) if damaged else 0):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        folder, path = copy_of(folders[kind], tmp_path, name)
        path.write_bytes(damaged)
        assert all(message is None or str(folder) in message for message in verdicts(folder, alarm))


def test_a_vocabulary_without_its_unknown_token(folders, tmp_path, alarm):
    folder, path = copy_of(folders["wordpiece"], tmp_path, "vocab.txt")
    path.write_text("")
    assert_refused(folder, alarm, "UNK")


def test_links_within_a_cache_are_followed(folders, tmp_path, alarm):
    """As a Hugging Face cache lays a snapshot out."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/abc"
    shutil.copytree(folders["bpe"], blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert verdicts(snapshot, alarm) == [None, None]


def test_commands_end_with_code_2_and_one_line(folders, tmp_path, jsonl, capsys, alarm):
    for kind, name in CASES:
        folder, path = copy_of(folders[kind], tmp_path, name)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        alarm()
        command = [
            "prepare",
            "--input",
            str(jsonl),
            "--tokenizer",
            str(folder),
            "--output",
            str(tmp_path / "out"),
        ]
        assert cli.main(["data", *command]) == 2
        message = capsys.readouterr().err
        assert str(path) in message.replace("\n", "")
        assert "Traceback" not in message


def test_generate_ends_with_code_2(folders, tmp_path, capsys, alarm):
    folder, path = copy_of(folders["bpe"], tmp_path, "tokenizer.json")
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=300, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    values = json.loads(path.read_text())
    values["model"]["vocab"]["hostile"] = 2**32 - 1
    path.write_text(json.dumps(values))
    alarm()
    assert (
        cli.main(["generate", "--model", str(folder), "--prompt", "a", "--max-new-tokens", "1"])
        == 2
    )
    assert "hostile" in capsys.readouterr().err
