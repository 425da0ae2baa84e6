"""The commands of docs/object-storage.md, as printed, against an S3 server."""

from __future__ import annotations

import shlex

import pytest
from documents import commands
from object_stores import needs_s3
from tiny_models import save_model

from shardzoo.cli.main import main
from shardzoo.files import object_store


@needs_s3
@pytest.mark.before_release
def test_commands_of_the_page_run(s3_bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "openai-community" / "gpt2", "GPT2LMHeadModel", "gpt2")
    (tmp_path / "corpus.jsonl").write_text('{"text": "a few words of a corpus"}\n' * 50)
    corpus = (tmp_path / "corpus.jsonl").read_bytes()
    object_store.write_object("s3://models/texts/corpus.jsonl", corpus)
    for command in commands("docs/object-storage.md"):
        program, *words = shlex.split(command, comments=True)
        assert program == "shardzoo"
        assert main(words) == 0, command
    for path in tmp_path.iterdir():
        assert not path.name.startswith("s3:")
    # What the page has written is of no use for other tests.
    for name in object_store.list_objects("s3://models"):
        object_store.remove_object(f"s3://models/{name}")
