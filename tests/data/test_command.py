"""`shardzoo data`, command by command, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shardzoo.cli.data import main
from shardzoo.data import IndexedDataset, load_tokenizer


def test_a_corpus_from_text_to_splits(jsonl, texts, tmp_path, capsys):
    assert (
        main(
            [
                "train-tokenizer",
                "--input",
                str(jsonl),
                "--output",
                f"{tmp_path}/tok",
                "--vocab-size",
                "400",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "200 documents" in shown
    assert "(not 400: the texts have no more)" in shown
    arguments = [
        "prepare",
        "--input",
        str(jsonl),
        "--tokenizer",
        f"{tmp_path}/tok",
        "--output",
        f"{tmp_path}/all",
    ]
    assert main([*arguments, "--workers", "2"]) == 0
    out = capsys.readouterr().out
    assert "200 documents" in out
    assert "MB/s" in out
    assert main(["inspect", f"{tmp_path}/all", "--tokenizer", f"{tmp_path}/tok"]) == 0
    out = capsys.readouterr().out
    assert "uint16" in out
    assert "Document 0." in out
    shares = ["--shares", "0.8", "0.1", "0.1"]
    assert main(["split", f"{tmp_path}/all", "--output", f"{tmp_path}/part", *shares]) == 0
    parts = [IndexedDataset(tmp_path / f"part_{name}") for name in ("train", "valid", "test")]
    assert [part.num_documents for part in parts] == [160, 20, 20]
    assert (
        main(["merge", *(str(part.prefix) for part in parts), "--output", f"{tmp_path}/again"]) == 0
    )
    merged, tokenizer = IndexedDataset(tmp_path / "again"), load_tokenizer(tmp_path / "tok")
    found = [tokenizer.decode(merged.document(i)[:-1].tolist()) for i in range(200)]
    assert sorted(found) == sorted(texts)


def test_both_spellings_and_sentencepiece(jsonl, tmp_path, capsys):
    command = ["train-tokenizer", "--input", str(jsonl), "--output", f"{tmp_path}/sp"]
    assert main([*command, "--kind", "sentencepiece", "--vocab_size", "320"]) == 0
    assert load_tokenizer(tmp_path / "sp").pad_token_id == 0


def test_bad_records_are_shown_or_fatal(tmp_path, tokenizer_dir, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "good"}) + "\n{\n")
    command = [
        "prepare",
        "--input",
        str(path),
        "--tokenizer",
        str(tokenizer_dir),
        "--output",
        f"{tmp_path}/a",
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "bad records skipped: 1" in out
    assert "record 2" in out
    assert main([*command, "--on-bad-record", "fail"]) == 2
    assert capsys.readouterr().err.startswith("error: bad record in ")
    command[-1] = f"{tmp_path}/none"
    assert main([*command, "--text-key", "txet"]) == 2
    assert "holds no document with text" in capsys.readouterr().err
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["inspect", "/nowhere/at/all"], "does not exist"),
        (["prepare", "--tokenizer", "/nowhere", "--output", "/tmp/x"], "/nowhere does not exist"),
        (["split", "/nowhere", "--output", "/tmp/x"], "does not exist"),
        (["train-tokenizer", "--output", "/tmp/x", "--vocab-size", "3"], "at least 257"),
    ],
)
def test_mistakes_are_one_line(command, reason, capsys):
    assert main(command) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_reading_and_writing_corpora_loads_no_torch():
    code = (
        "import sys, shardzoo.data as d; d.prepare_dataset, d.IndexedDataset, d.prepare_corpus, "
        "d.load_tokenizer;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules or 'datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there():
    import shardzoo.data

    for name in shardzoo.data.__all__:
        assert getattr(shardzoo.data, name).__name__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shardzoo.data.nothing
