"""Every checkpoint holds its tokenizer, and `extra_files` is checked before the first step."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from every_case import every_day
from tiny_models import hf_model, save_model, tiny, tokenizer_like
from training import Pairs, tiny_t5, without_digests

OWN = (
    "config.json", "manifest.json", "trainer_state.json", "generation_config.json", "rank_00.safetensors",
    "optimizer_00.safetensors", "random_07.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
)  # fmt: skip


def tokenizer_folder(folder: Path, family: str = "t5") -> Path:
    tokenizer_like(family).save_pretrained(folder)
    return folder


def train(mesh, folder: Path, model=None, data=None, steps: int = 1, **options):
    """Trains one step in one process, or by DDP, and returns the last checkpoint."""
    from shardzoo.trainer import Trainer

    env_type = "pytorchDDP" if mesh else "pytorch"
    resume = options.pop("resume", False)
    trainer = Trainer(
        env_type=env_type, train_steps=steps, save_dir=str(folder), resume=resume, mesh=mesh
    )
    trainer.train(
        tiny_t5() if model is None else model,
        train_dataset=Pairs() if data is None else data,
        **options,
    )
    return trainer.run_folder.checkpoint(steps)


def files_of(folder: Path, names: set[str] | None = None) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if names is None or path.name in names
    }


def digest(folder: Path) -> dict[str, object]:
    """A vocabulary by transformers: the SHA-256 of all tokens in order, each after its length in four bytes."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    by_id = {index: token.encode() for token, index in tokenizer.get_vocab().items()}
    assert sorted(by_id) == list(range(len(tokenizer)))
    content = b"".join(
        len(by_id[i]).to_bytes(4, "little") + by_id[i] for i in range(len(tokenizer))
    )
    return {"size": len(tokenizer), "sha256": hashlib.sha256(content).hexdigest()}


def recorded(checkpoint: Path) -> object:
    return json.loads((checkpoint / "manifest.json").read_text()).get("vocabulary")


def a_file(folder: Path) -> str:
    (folder / "f").write_text("")
    return str(folder / "f")


def a_link(folder: Path, target: str) -> Path:
    (folder / "vocab.txt").symlink_to(target)
    return folder


def a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "vocab.txt")
    return folder


def a_huge_file(folder: Path) -> Path:
    with (folder / "notes.txt").open("wb") as file:
        file.truncate((256 << 20) + 1)
    return folder


def a_huge_id(folder: Path) -> Path:
    (folder / "vocab.json").write_text('{"a": 4294967295}')
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing", "missing does not exist; name a folder of small files"),
        (a_file, "f is not a folder; name a folder"),
        # To Python 3.14 a path with too long a name does not exist.
        (lambda folder: "a" * 300, "cannot read a+: File name too long|a+ does not exist"),
        (lambda folder: f"{folder}\0", "does not exist; name a folder"),
        (lambda folder: "", "must be the path of a folder, not ''"),
        (lambda folder: ["tokenizer.json"], "must be the path of a folder, not"),
        (
            lambda folder: a_link(folder, "/etc/passwd"),
            "is a link out of its folder, to /etc/passwd",
        ),
        (lambda folder: a_link(folder, "nowhere"), "cannot read .*vocab.txt: No such file"),
        (a_pipe, "vocab.txt is not a regular file"),
        (a_huge_file, "have 268,435,457 bytes, and each checkpoint would hold a copy"),
        (a_huge_id, "'a' has the id 4294967295"),
    ],
)
def test_unusable_extra_files_are_refused_before_the_first_step(tmp_path, make, message):
    (tmp_path / "extra").mkdir()
    model = tiny_t5()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        train(None, tmp_path / "run", model, extra_files=make(tmp_path / "extra"))
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", OWN)
def test_extra_files_do_not_replace_the_checkpoints_own(tmp_path, name):
    folder = tokenizer_folder(tmp_path / "extra")
    (folder / name).write_text("{}")
    with pytest.raises(ValueError, match=f"{name} would replace a file of the checkpoint"):
        train(None, tmp_path / "run", extra_files=folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "problem", [PermissionError(13, "Permission denied", "vocab"), OSError(5, "Input/output error")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, problem):
    folder = tokenizer_folder(tmp_path / "extra")

    def read(self: Path) -> bytes:
        raise problem

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(ValueError, match=f"extra_files: cannot read .*{problem.strerror}"):
        train(None, tmp_path / "run", extra_files=folder)


def test_every_rank_is_told(run_mesh, tmp_path):
    def refused(mesh) -> str:
        try:
            train(mesh, tmp_path / "run", extra_files=tmp_path / "missing")
        except ValueError as error:
            return str(error)
        return "trained"

    assert [text.endswith("such as a tokenizer's") for text in run_mesh(1, refused, data=2)] == [
        True,
        True,
    ]


def test_extra_files_are_those_of_the_start(tmp_path):
    """A string; inner folders and links inside the folder; files that change and disappear while training runs."""
    folder = tokenizer_folder(tmp_path / "extra")
    (folder / "notes.txt").write_text("1")
    (folder / "alias.txt").symlink_to("notes.txt")
    (folder / "inner").mkdir()
    expected = {
        **files_of(folder, {"tokenizer.json", "tokenizer_config.json", "notes.txt"}),
        "alias.txt": b"1",
    }
    vocabulary = digest(folder)

    class Deletes(Pairs):
        def __getitem__(self, index):
            shutil.rmtree(folder, ignore_errors=True)
            return super().__getitem__(index)

    from shardzoo.models import from_config

    checkpoint = train(
        None, tmp_path / "run", from_config(tiny("t5")), Deletes(), extra_files=str(folder)
    )
    assert not folder.exists()
    assert files_of(checkpoint, set(expected)) == expected
    assert not (checkpoint / "inner").exists()
    assert not (checkpoint / "alias.txt").is_symlink()
    assert recorded(checkpoint) == vocabulary


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pretrained_model_brings_its_tokenizer(run_mesh, tmp_path, ranks):
    source = save_model(tmp_path / "t5", "T5ForConditionalGeneration", "t5")
    (source / "README.md").write_text("not the tokenizer's")

    def work(mesh):
        import shardzoo

        model = shardzoo.from_pretrained(source)
        return train(mesh, tmp_path / "run", model.train())

    checkpoint = work(None) if ranks == 1 else run_mesh(1, work, data=2)[0]
    names = {"tokenizer.json", "tokenizer_config.json"}
    assert files_of(checkpoint, names) == files_of(source, names)
    assert not (checkpoint / "README.md").exists()
    assert recorded(checkpoint) == digest(source)


def test_transformers_models_bring_theirs_and_resumed_runs_keep_it(tmp_path, capsys):
    import transformers

    source = save_model(tmp_path / "t5", "T5ForConditionalGeneration", "t5")
    model = transformers.T5ForConditionalGeneration.from_pretrained(source).train()
    first = train(None, tmp_path / "run", model)
    names = {"tokenizer.json", "tokenizer_config.json"}
    assert files_of(first, names) == files_of(source, names)
    shutil.rmtree(source)
    again = hf_model("T5ForConditionalGeneration", 0.0, vocab_size=model.config.vocab_size).train()
    second = train(None, tmp_path / "run", again, steps=2, resume=True)
    assert files_of(second, names) == files_of(first, names)
    assert "tokenizer" not in capsys.readouterr().out


def damaged(folder: Path) -> Path:
    save_model(folder, "T5ForConditionalGeneration", "t5")
    (folder / "tokenizer.json").write_text("{")
    return folder


def replaced(folder: Path) -> Path:
    """A checkpoint with a tokenizer that is not the one of its record."""
    from shardzoo.models import from_pretrained

    source = save_model(folder.with_name("source"), "T5ForConditionalGeneration", "t5")
    checkpoint = without_digests(train(None, folder, from_pretrained(source).train()))
    tokenizer_folder(checkpoint, "bert")
    return checkpoint


def without_tokenizer(folder: Path) -> Path:
    hf_model("T5ForConditionalGeneration", 0.0).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "reason"),
    every_day(
        [(damaged, "tokenizer.json")],
        more=[
            (None, "the model was not loaded from a folder"),
            (without_tokenizer, "holds no tokenizer"),
            (replaced, "has another vocabulary"),
        ],
    ),
)
def test_a_run_without_a_tokenizer_says_so_once(tmp_path, capsys, make, reason):
    from shardzoo.models import from_config, from_pretrained

    model = from_config(tiny("t5")) if make is None else from_pretrained(make(tmp_path / "t5"))
    checkpoint = train(None, tmp_path / "run", model.train(), steps=2)
    shown = "".join(capsys.readouterr().out.split())  # the console breaks lines
    assert shown.count("thecheckpointswillholdnotokenizer") == 1
    assert reason.replace(" ", "") in shown
    assert "passitsfolderasextra_files" in shown
    assert not any(
        path.name.startswith(("tokenizer", "special_tokens", "spiece"))
        for path in checkpoint.iterdir()
    )
    assert recorded(checkpoint) is None


def test_other_extra_files_do_not_displace_the_tokenizer(tmp_path):
    from shardzoo.models import from_pretrained

    source = save_model(tmp_path / "t5", "T5ForConditionalGeneration", "t5")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "notes.txt").write_text("a")
    checkpoint = train(
        None, tmp_path / "run", from_pretrained(source).train(), extra_files=tmp_path / "extra"
    )
    assert (checkpoint / "notes.txt").read_text() == "a"
    assert (checkpoint / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert recorded(checkpoint) == digest(source)


@pytest.mark.parametrize(
    "pretrained", [False, True], ids=["a new model", "a model with another tokenizer"]
)
def test_a_loader_brings_the_tokenizer_of_its_samples(tmp_path, capsys, pretrained):
    """With the sentinels that the objective added."""
    from shardzoo.data import (
        IndexedDataset,
        IndexedDatasetWriter,
        PretrainingData,
        build_loader,
        load_tokenizer,
    )
    from shardzoo.models import from_config

    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "tokenizer"))
    ids = tokenizer.encode("one two three four five six seven " * 40)
    with IndexedDatasetWriter(tmp_path / "corpus") as writer:
        writer.add_sequence(ids)
        writer.end_document()
    settings = PretrainingData("t5", sequence_length=32, micro_batch_size=1)
    loader = build_loader(settings, IndexedDataset(tmp_path / "corpus"), tokenizer)
    assert tokenizer.token_to_id("<extra_id_0>") is not None
    model = from_config(tiny("t5", vocab_size=tokenizer.vocab_size))
    if pretrained:
        model.name_or_path = str(tokenizer_folder(tmp_path / "model", "bert"))
    checkpoint = train(None, tmp_path / "run", model.train(), loader)
    stored = load_tokenizer(checkpoint)
    assert stored.vocab_size == tokenizer.vocab_size
    assert stored.encode("one two") == tokenizer.encode("one two")
    assert stored.token_to_id("<extra_id_0>") == tokenizer.token_to_id("<extra_id_0>")
    assert recorded(checkpoint) == digest(checkpoint)
    shown = " ".join(capsys.readouterr().out.split())
    assert ("the data has another tokenizer than the folder of the model" in shown) == pretrained
    assert "no tokenizer" not in shown


def test_the_recorded_vocabulary_survives_resharding(tmp_path):
    from shardzoo.checkpoint.manifest import Manifest
    from shardzoo.convert import merge, split
    from shardzoo.models import from_pretrained

    source = save_model(tmp_path / "t5", "T5ForConditionalGeneration", "t5")
    checkpoint = train(None, tmp_path / "run", from_pretrained(source).train())
    split(checkpoint, tmp_path / "two", 2)
    split(tmp_path / "two", tmp_path / "one", 1)
    assert recorded(tmp_path / "two") == recorded(tmp_path / "one") == digest(source)
    merge(tmp_path / "two", tmp_path / "hf")
    split(tmp_path / "hf", tmp_path / "again", 2)
    assert "vocabulary" not in json.loads((tmp_path / "again" / "manifest.json").read_text())
    assert Manifest.read(tmp_path / "again").vocabulary is None
    assert files_of(tmp_path / "again", {"rank_00.safetensors"}) == files_of(
        tmp_path / "two", {"rank_00.safetensors"}
    )


@pytest.mark.parametrize(
    "value", [{"size": -1, "sha256": "0" * 64}, {"size": 3, "sha256": "x"}, [], "a", {"size": 1}]
)
def test_a_manifest_with_a_damaged_vocabulary_is_refused(tmp_path, value):
    from shardzoo.checkpoint.manifest import Manifest
    from shardzoo.files.json_digest import add_digest

    content = {
        "format_version": 1, "model_type": "t5", "tensor_parallel_size": 1, "vocab_size": 3, "padded_vocab_size": 64,
        "tensors": {}, "extras": {}, "vocabulary": value,
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(add_digest(content)))
    with pytest.raises(ValueError, match=r"manifest\.json"):
        Manifest.read(tmp_path)
