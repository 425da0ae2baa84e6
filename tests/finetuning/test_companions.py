"""The files that every checkpoint of a fine-tuned model gets beside its weights."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import transformers
from tiny_models import save_model

import shardzoo
from shardzoo.finetuning.saving import save_whole, write_companions

NAME = "generation_config.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = save_model(tmp_path_factory.mktemp("source") / "hf", "GPT2LMHeadModel", "gpt2", seed=1)
    (made / NAME).unlink(missing_ok=True)
    return made


@pytest.mark.parametrize("place", ["file", "configuration", "nowhere"])
def test_the_settings_of_generation_are_kept(place, folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in folder.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    settings = {"num_beams": 3, "max_length": 17}
    if place == "file":
        (source / NAME).write_text(json.dumps(settings))
    if place == "configuration":  # as before transformers 4.26
        values = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**values, **settings}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    made = tmp_path / "companions"
    made.mkdir()
    (made / "left over").touch()
    write_companions(tokenizer, SimpleNamespace(native=True, folder=source), made)
    names = {file.name for file in made.iterdir()}
    assert "tokenizer.json" in names
    assert "left over" not in names
    if place == "nowhere":
        assert NAME not in names
    else:
        stored = json.loads((made / NAME).read_text())
        assert {name: stored[name] for name in settings} == settings


def test_transformers_writes_its_own_settings(folder, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    source = SimpleNamespace(native=False, folder=folder)
    write_companions(tokenizer, source, tmp_path / "companions")
    assert not (tmp_path / "companions" / NAME).exists()


def test_what_the_model_writes_counts(folder, tmp_path):
    model = shardzoo.from_pretrained(folder)
    companions = tmp_path / "companions"
    companions.mkdir()
    for name in ("config.json", "notes.json"):
        (companions / name).write_text('{"of": "the companions"}')
    save_whole(
        model, SimpleNamespace(native=True, folder=folder), companions, tmp_path / "out" / "hf"
    )
    saved = tmp_path / "out" / "hf"
    assert json.loads((saved / "config.json").read_text())["model_type"] == "gpt2"
    assert json.loads((saved / "notes.json").read_text()) == {"of": "the companions"}
