"""A source that is replaced after its headers were read, before its tensors are read."""

from __future__ import annotations

import os
import shutil

import pytest

import shardzoo
from shardzoo.checkpoint.file_io import read_into
from shardzoo.checkpoint.stored_tensor import StoredTensor
from shardzoo.convert import operations
from shardzoo.files.working_copies import open_for_reading


@pytest.fixture(scope="module")
def folders(gpt2_folder, gpt2_shards, tmp_path_factory):
    """Returns the same model in every format that is read."""
    made = tmp_path_factory.mktemp("formats")
    operations.merge(gpt2_folder, made / "dcp", style="dcp")
    operations.split(gpt2_folder, made / "legacy", 2, style="legacy")
    operations.split(gpt2_folder, made / "megatron", 2, style="megatron")
    return {
        "huggingface": gpt2_folder,
        "shards": gpt2_shards,
        "dcp": made / "dcp",
        "legacy": made / "legacy",
        "megatron": made / "megatron",
    }


def _replace_weights(folder):
    """Replaces each weight file by another one of the same size, as a new upload would."""
    for path in folder.rglob("*"):
        if path.suffix in (".safetensors", ".pt", ".distcp"):
            new = path.with_name("new")
            new.write_bytes(path.read_bytes()[:-1] + b"\1")
            os.replace(new, path)


@pytest.mark.parametrize("kind", ["huggingface", "shards", "dcp", "legacy", "megatron"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_conversion_is_refused(kind, workers, folders, tmp_path, monkeypatch):
    if workers == 2 and kind != "huggingface":
        pytest.skip("the processes read all formats by the same function")
    source = tmp_path / "source"
    shutil.copytree(folders[kind], source)
    original = operations._collect_texts

    def collect_and_replace(*arguments):
        texts = original(*arguments)
        _replace_weights(source)
        return texts

    monkeypatch.setattr(operations, "_collect_texts", collect_and_replace)
    with pytest.raises(ValueError, match="changed while it was being read"):
        operations.merge(source, tmp_path / "destination", operations.Options(workers=workers))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_another_configuration_is_refused(gpt2_folder, tmp_path, monkeypatch):
    source = tmp_path / "source"
    shutil.copytree(gpt2_folder, source)
    original = operations._collect_texts

    def replace_and_collect(*arguments):
        text = (source / "config.json").read_text()
        (source / "config.json").write_text(text.replace('"layer_norm_epsilon"', '"other_key"'))
        return original(*arguments)

    monkeypatch.setattr(operations, "_collect_texts", replace_and_collect)
    with pytest.raises(ValueError, match=r"config\.json changed while it was being read"):
        operations.split(source, tmp_path / "destination", 2)


@pytest.mark.parametrize("kind", ["huggingface", "shards"])
def test_loading_is_refused(kind, folders, tmp_path, monkeypatch):
    source = tmp_path / "source"
    shutil.copytree(folders[kind], source)
    from shardzoo.models import loading

    original = loading.open_checkpoint

    def open_and_replace(*arguments):
        checkpoint = original(*arguments)
        _replace_weights(source)
        return checkpoint

    monkeypatch.setattr(loading, "open_checkpoint", open_and_replace)
    with pytest.raises(ValueError, match="changed while it was being read"):
        shardzoo.from_pretrained(source)


def test_a_file_that_ends_early(tmp_path):
    import numpy as np

    path = tmp_path / "file"
    path.write_bytes(bytes(5))
    descriptor = open_for_reading(path)
    with pytest.raises(ValueError, match="ends early"):
        read_into(StoredTensor("w", path, "U8", (6,), 0), descriptor, 0, np.empty(6, np.uint8))
    os.close(descriptor)
