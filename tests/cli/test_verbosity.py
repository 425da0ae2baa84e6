"""`--quiet` and `--verbose` mean the same in every command, and `--config` works for `shardzoo data` too."""

from __future__ import annotations

import json

import pytest
from tiny_models import save_model

from shardzoo.cli.main import main
from shardzoo.files.verbosity import VARIABLE, take_verbosity


@pytest.fixture(autouse=True)
def as_usual(monkeypatch):
    """Commands set the variable in this process, which then gets its value of before back."""
    monkeypatch.setenv(VARIABLE, "")


@pytest.fixture
def corpus(tmp_path):
    """A folder with a text, its tokenizer, and a file of settings for `data prepare`."""
    (tmp_path / "text").write_text("one two three\nfour five six\n")
    words = ["--output", f"{tmp_path}/tok", "--input", f"{tmp_path}/text", "--vocab-size", "280"]
    assert main(["data", "train-tokenizer", "--quiet", *words]) == 0
    settings = {"tokenizer": f"{tmp_path}/tok", "input": [f"{tmp_path}/text"], "append_eos": False}
    (tmp_path / "settings.yaml").write_text(json.dumps(settings))
    return tmp_path


def test_options_are_taken_anywhere_before_two_dashes(monkeypatch):
    assert take_verbosity(["--quiet", "convert", "a", "--verbose", "b"]) == ["convert", "a", "b"]
    assert take_verbosity(["data", "--", "--quiet"]) == ["data", "--", "--quiet"]


def test_a_quiet_command_prints_results_and_errors_alone(corpus, capsys):
    prepare = ["data", "prepare", "--config", f"{corpus}/settings.yaml"]
    capsys.readouterr()
    assert main([*prepare, "--output", f"{corpus}/loud"]) == 0
    shown = capsys.readouterr().out
    assert "1 documents, " in shown
    assert "made again" not in shown
    assert main([*prepare, "--output", f"{corpus}/loud"]) == 0
    assert (
        "from the same text with the same settings, and were made again" in capsys.readouterr().out
    )
    assert main([*prepare, "--output", f"{corpus}/quiet", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["--quiet", "data", "inspect", f"{corpus}/quiet"]) == 0  # an answer is a result
    assert "documents" in capsys.readouterr().out
    assert main([*prepare, "--output", f"{corpus}/no/such/folder\0", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_quiet_conversion_and_its_json(tmp_path, capsys):
    folder = save_model(tmp_path / "model", "GPT2LMHeadModel", "gpt2")
    capsys.readouterr()
    assert main(["--quiet", "convert", "split", str(folder), f"{tmp_path}/two", "--tp", "2"]) == 0
    assert capsys.readouterr() == ("", "")
    words = ["convert", "merge", f"{tmp_path}/two", f"{tmp_path}/one", "--json", "--quiet"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["destination"] == f"{tmp_path}/one"
    assert not err


def test_a_verbose_command_shows_where_an_error_was_found(tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text("nothing: 1\n")
    words = ["data", "prepare", "--config", f"{tmp_path}/settings.yaml"]
    assert main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main([*words, "--verbose"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.splitlines()[-1].startswith("error: --config: ")


def test_the_command_line_counts_more_than_the_file(corpus, capsys):
    words = [
        "data",
        "prepare",
        "--config",
        f"{corpus}/settings.yaml",
        "--output",
        f"{corpus}/ended",
    ]
    assert main([*words, "--append-eos", "--quiet"]) == 0
    main([*words[:-1], f"{corpus}/open", "--quiet"])
    sizes = [len((corpus / f"{name}.bin").read_bytes()) for name in ("ended", "open")]
    assert sizes[0] > sizes[1]
