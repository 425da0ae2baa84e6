"""Models and corpora at `hf://`, read from a server on this machine that speaks as the Hub does."""

from __future__ import annotations

import json

import hub_files
import pytest
import torch

import shardzoo
from shardzoo.cli.main import main
from shardzoo.convert.operations import split
from shardzoo.files import object_store
from shardzoo.files.object_store import find_object, list_objects, read_object, read_range


@pytest.fixture(scope="module")
def server():
    with hub_files.serve() as found:
        yield found


@pytest.fixture
def hub(server, monkeypatch):
    """The server, which `hf://` reaches in this process."""
    from huggingface_hub import HfFileSystem

    HfFileSystem.clear_instance_cache()
    filesystem = HfFileSystem(endpoint=server.address, token=False, skip_instance_cache=True)
    monkeypatch.setitem(object_store._filesystems, (object_store.os.getpid(), "hf"), filesystem)
    server.repositories.clear()
    server.sent.clear()
    return server


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_objects_of_a_repository(hub):
    hub.repositories["models/me/tiny"] = {"a": b"0123456789", "deep/b": b"1", "deep-2/c": b"2"}
    found = list_objects("hf://me/tiny")
    assert {name: entry.size for name, entry in found.items()} == {
        "a": 10,
        "deep/b": 1,
        "deep-2/c": 1,
    }
    assert found["a"] == find_object("hf://me/tiny/a")
    assert list_objects("hf://me/tiny@main/deep").keys() == {"b"}
    assert find_object("hf://me/tiny/none") is None
    assert find_object("hf://me/tiny/deep") is None
    assert read_object("hf://me/tiny/deep/b") == b"1"
    hub.sent.clear()
    assert read_range("hf://me/tiny/a", 2, 4) == b"23"
    assert hub.sent == {"a": 2}

    # What is committed meanwhile is seen.
    hub.repositories["models/me/tiny"]["a"] = b"9876543210"
    assert find_object("hf://me/tiny/a") != found["a"]
    assert list_objects("hf://me/tiny")["a"] != found["a"]
    with pytest.raises(OSError, match="me/none"):
        list_objects("hf://me/none")


def test_a_model_is_read_by_ranges(hub, gpt2_folder, tmp_path):
    split(gpt2_folder, tmp_path / "split", 2)
    hub.repositories["models/me/tiny"] = files_of(gpt2_folder)
    hub.repositories["models/me/shards"] = {
        f"two/{name}": data for name, data in files_of(tmp_path / "split").items()
    }
    split("hf://me/tiny", tmp_path / "again", 2)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "split")
    whole = shardzoo.from_pretrained(gpt2_folder).state_dict()
    for url in ("hf://me/tiny@main", "hf://me/shards/two"):
        found = shardzoo.from_pretrained(url).state_dict()
        assert found.keys() == whole.keys()
        for name, value in whole.items():  # Some are no numbers.
            assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    assert main(["convert", "verify", "hf://me/shards/two", str(gpt2_folder)]) == 0


def test_a_corpus_is_read(hub, tmp_path, monkeypatch, capsys):
    from shardzoo.files import working_copies

    monkeypatch.setattr(working_copies, "LARGEST_TEXT", 100)
    rows = [json.dumps({"text": f"the text number {index} of a corpus"}) for index in range(50)]
    text = "\n".join(rows).encode()
    hub.repositories["datasets/me/texts"] = {"data/corpus.jsonl": text}
    (tmp_path / "corpus.jsonl").write_bytes(text)
    url = "hf://datasets/me/texts/data/corpus.jsonl"
    prefixes: list[bytes] = []
    for name, source in (("here", str(tmp_path / "corpus.jsonl")), ("there", url)):
        tokenizer = str(tmp_path / f"{name}-tokenizer")
        words = ["data", "train-tokenizer", "--input", source, "--output", tokenizer]
        assert main([*words, "--vocab-size", "300"]) == 0
        words = ["data", "prepare", "--input", source, "--tokenizer", tokenizer]
        assert main([*words, "--output", str(tmp_path / name)]) == 0
        prefixes.append((tmp_path / f"{name}.bin").read_bytes())
    assert prefixes[0] == prefixes[1]
