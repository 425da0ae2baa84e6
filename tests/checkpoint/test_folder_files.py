"""Files of a folder besides its weights."""

from __future__ import annotations

from shardzoo.checkpoint.folder_files import replace_saved_model

OTHERS = ("model_ema.safetensors", "pytorch_model_ema.bin", "model-best.safetensors", "notes.txt")


def _write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{folder.name} {name}")


def test_a_saved_model_replaces_only_what_another_one_left(tmp_path):
    folder = tmp_path / "model"
    old = (
        "pytorch_model.bin",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "adapter_model.safetensors",
        "adapter_config.json",
    )
    _write(folder, "config.json", "vocab.txt", "README.md", "runs/log", *old, *OTHERS)
    new = tmp_path / "new"
    _write(new, "config.json", "model.safetensors", "tokenizer.json", "README.md", "more/file")
    names = ["README.md", "config.json", "model.safetensors", "more", "tokenizer.json"]

    replace_saved_model(folder, new)
    assert not new.exists()
    found = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    assert found.keys() == {*names, *OTHERS} - {"more"}
    for name, text in found.items():
        assert text == f"{'model' if name in OTHERS else 'new'} {name}"
    assert (folder / "runs" / "log").read_text() == "model runs/log"
    assert (folder / "more" / "file").read_text() == "new more/file"

    _write(new, "config.json")
    replace_saved_model(tmp_path / "absent", new)
    assert (tmp_path / "absent" / "config.json").exists()
