"""The files of a training checkpoint: each has a digest, is read only in its folder, and is written by all replicas."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from every_case import by_turns
from safetensors.torch import load, load_file
from tiny_models import tokenizer_like
from training import Pairs, native_t5, run_training

from shardzoo.checkpoint.rank_files import TensorPart, divide_file, write_share
from shardzoo.cli.main import main
from shardzoo.files.json_digest import add_digest
from shardzoo.trainer.checkpointing.resume import verify_checkpoint

STATE = "trainer_state.json"
STEPS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of the zoo's T5 that saved two checkpoints with a tokenizer."""
    from shardzoo.trainer import Trainer, TrainingArguments

    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    tokenizer_like("t5").save_pretrained(folder.parent / "tokenizer")
    arguments = TrainingArguments(
        save_dir=str(folder),
        micro_batch_size=2,
        train_steps=STEPS,
        save_interval=1,
        env_type="pytorch",
    )
    Trainer(arguments).train(
        native_t5(None), train_dataset=Pairs(), extra_files=folder.parent / "tokenizer"
    )
    return folder


def copy_of(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "run")
    return folder / f"run/checkpoints/step-{STEPS:06d}"


def test_every_file_has_a_digest(run):
    for checkpoint in run.glob("checkpoints/step-*"):
        recorded = json.loads((checkpoint / STATE).read_text())["files"]
        assert recorded.keys() == {path.name for path in checkpoint.iterdir()} - {STATE}
        assert {"config.json", "manifest.json", "tokenizer.json"} <= recorded.keys()
        for name, digest in recorded.items():
            assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == digest


def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    flushed, sync, rename = set(), os.fsync, Path.rename

    def noting(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def checked(self, target):
        if target.name == f"step-{STEPS:06d}":
            assert {
                path.name for path in self.iterdir() if path.stat().st_ino not in flushed
            } == set()
            assert self.stat().st_ino in flushed  # the list of the files
            renamed.append(target)
        return rename(self, target)

    renamed: list[Path] = []
    tokenizer_like("t5").save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Path, "rename", checked)
    run_training(None, tmp_path / "run", train_steps=STEPS, extra_files=tmp_path / "tokenizer")
    assert renamed
    assert (tmp_path / "run/checkpoints").stat().st_ino in flushed


NAMES = (
    "config.json",
    "manifest.json",
    "tokenizer.json",
    "rank_00.safetensors",
    "optimizer_00.safetensors",
    STATE,
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blow", ["zeroed", "emptied", "flipped", "removed"])
def test_a_damaged_file_is_refused_at_every_door(run, tmp_path, capsys, name, blow):
    """By resuming, loading, the converter and `shardzoo checkpoint verify`; the optimizer's file is not loaded."""
    import shardzoo

    checkpoint = copy_of(run, tmp_path)
    path = checkpoint / name
    content = bytearray(path.read_bytes())
    if blow == "removed":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(
            {"zeroed": bytes(len(content)), "emptied": b"", "flipped": bytes(content)}[blow]
        )
    assert name in verify_checkpoint(checkpoint)
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr().out
    assert re.search(rf"step-0*{STEPS} .*damaged", shown)
    assert re.search(r"step-0*1 .*ok", shown)
    assert name in shown
    if not name.startswith("optimizer") and (name, blow) != (STATE, "removed"):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            shardzoo.from_pretrained(checkpoint)
        assert main(["convert", "merge", str(checkpoint), str(tmp_path / "merged")]) == 2
        assert name in capsys.readouterr().err
        assert not (tmp_path / "merged").exists()


def sign(checkpoint: Path, files: dict) -> None:
    content = json.loads((checkpoint / STATE).read_text())
    del content["sha256"]
    (checkpoint / STATE).write_text(
        json.dumps(add_digest({**content, "files": {**content["files"], **files}}))
    )


NAMED = {
    "absolute": "/dev/zero", "upwards": "../../arguments.yaml", "folder": ".", "zero byte": "a\0b", "empty": "",
    "device": "zero", "pipe": "pipe", "link out of the folder": "link",
}  # fmt: skip


@pytest.mark.timeout(20)  # reading /dev/zero or a pipe would never end
@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize(
    "digest", ["0" * 64, [{"ranges": [[0, 5]], "sha256": "0" * 64}], [{"ranges": 3}], [], 7, None]
)
def test_names_outside_the_folder_are_never_opened(run, tmp_path, capsys, kind, digest):
    checkpoint = copy_of(run, tmp_path)
    os.mkfifo(checkpoint / "pipe")
    (checkpoint / "zero").symlink_to("/dev/zero")
    (checkpoint / "link").symlink_to(__file__)
    sign(checkpoint, {NAMED[kind]: digest})
    assert "is damaged" in verify_checkpoint(checkpoint)
    assert main(["checkpoint", "verify", str(checkpoint)]) == 2
    assert len(capsys.readouterr().out.splitlines()) < 20


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_never_opened(run, tmp_path):
    for number, name in enumerate((*NAMES, "random_00.safetensors", "tokenizer_config.json")):
        checkpoint = copy_of(run, tmp_path / str(number))
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)
        assert name in verify_checkpoint(checkpoint)


def test_files_that_do_not_belong_to_a_checkpoint(run, tmp_path):
    """A note does not matter; another rank's optimizer would be read."""
    checkpoint = copy_of(run, tmp_path)
    (checkpoint / "NOTES.txt").write_text("the best one so far")
    assert verify_checkpoint(checkpoint) == ""
    shutil.copy(checkpoint / "optimizer_00.safetensors", checkpoint / "optimizer_01.safetensors")
    assert "optimizer_01.safetensors" in verify_checkpoint(checkpoint)


UNSURE = {
    "none": [], "no part": {}, "infinite": [{"ranges": [[0, float("inf")]], "sha256": "0" * 64}],
    "overlap": [{"ranges": [[0, 9], [8, 12]], "sha256": "0" * 64}],
    "backwards": [{"ranges": [[9, 0], [0, 9]], "sha256": "0" * 64}],
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSURE)
def test_a_digest_of_nothing_is_no_digest(run, tmp_path, kind):
    checkpoint = copy_of(run, tmp_path)
    sign(checkpoint, {"rank_00.safetensors": UNSURE[kind]})
    assert "rank_00.safetensors" in verify_checkpoint(checkpoint)


@pytest.mark.timeout(20)  # hashing it would take an hour
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_size_is_not_read(run, tmp_path, capsys, name):
    checkpoint = copy_of(run, tmp_path)
    os.truncate(checkpoint / name, 1 << 43)
    assert f"{name} has 8,796,093,022,208 bytes" in verify_checkpoint(checkpoint)
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_each_damaged_file_is_named_once(run, tmp_path, capsys):
    checkpoint = copy_of(run, tmp_path)
    (checkpoint / "config.json").write_text("{}")
    os.truncate(checkpoint / "rank_00.safetensors", 100)
    (checkpoint / "optimizer_01.safetensors").touch()
    assert main(["checkpoint", "verify", str(checkpoint)]) == 2
    problems = [line for line in capsys.readouterr().out.splitlines() if ": " in line]
    assert [re.findall(r"\S+\.(?:json|safetensors)", line) for line in problems] == [
        ["config.json"], ["rank_00.safetensors"], ["optimizer_01.safetensors"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["step-٠٠٠٠٠٩", "step-0000002", "step-" + "9" * 200, "step-000002.abandoned"]
)
def test_a_folder_that_only_looks_like_a_checkpoint(run, tmp_path, capsys, name):
    copy_of(run, tmp_path).rename(tmp_path / "run" / "checkpoints" / name)
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0
    assert "step-000001" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", "2"), ("step", None), ("best", 3), ("groups", {}), ("data", []), ("version", 3)],
)
def test_a_state_of_another_kind_is_refused_when_a_run_resumes(run, tmp_path, field, value):
    from shardzoo.trainer.checkpointing.resume import read_state

    checkpoint = copy_of(run, tmp_path)
    content = json.loads((checkpoint / STATE).read_text())
    del content["sha256"]
    (checkpoint / STATE).write_text(json.dumps(add_digest({**content, field: value})))
    with pytest.raises(ValueError, match=f"{STATE} has {field}"):
        read_state(checkpoint)


def test_checkpoints_without_all_digests_stay_readable(run, tmp_path, capsys):
    """Before every file had a digest, only those of tensors had."""
    import shardzoo

    checkpoint = copy_of(run, tmp_path)
    content = json.loads((checkpoint / STATE).read_text())
    files = {
        name: digest for name, digest in content["files"].items() if name.endswith(".safetensors")
    }
    old = {
        name: value for name, value in content.items() if name not in ("sha256", "version", "sizes")
    }
    (checkpoint / STATE).write_text(json.dumps(add_digest({**old, "files": files})))
    assert verify_checkpoint(checkpoint) == ""
    shardzoo.from_pretrained(checkpoint)
    assert main(["checkpoint", "verify", str(checkpoint)]) == 0
    assert "no digest was recorded of config.json" in capsys.readouterr().out


def test_a_name_cannot_control_the_terminal(run, tmp_path, capsys):
    checkpoint = copy_of(run, tmp_path)
    sign(checkpoint, {"\x1b]0;owned\x07\x1b[2J\u202egpj": "0" * 64})
    assert main(["checkpoint", "verify", str(checkpoint)]) == 2
    shown = capsys.readouterr().out
    assert r"\x1b]0;owned\x07\x1b[2J\u202egpj" in shown
    assert not set("\x1b\x07\u202e") & set(shown)


# Replicas divide the files


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "large": torch.randn(37, 11, generator=generator, dtype=torch.float64),
        "half": torch.randn(501, generator=generator).bfloat16(),
        "turned": torch.randn(8, 6, generator=generator).t(),
        "number": torch.tensor(3.0),
        "nothing": torch.empty(0, dtype=torch.bool),
        "bytes": torch.arange(99, dtype=torch.uint8),
    }


def parts_of(
    whole: dict[str, torch.Tensor], rank: int, ranks: int
) -> dict[str, torch.Tensor | TensorPart]:
    """Some tensors as ZeRO has them: a flat part on each rank, of unequal sizes; the last ranks may have none."""
    found: dict[str, torch.Tensor | TensorPart] = dict(whole)
    for name in ("large", "bytes"):
        flat = whole[name].reshape(-1)
        size = -(-len(flat) // ranks) + 3
        found[name] = TensorPart(
            tuple(whole[name].shape), min(rank * size, len(flat)), flat[rank * size :][:size]
        )
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("partitioned", [False, True])
def test_ranks_write_one_file_together(tmp_path, ranks, partitioned):
    """It has the bytes that one rank writes, and safetensors itself reads it."""
    whole = tensors()
    alone = tmp_path / "alone"
    write_share(alone, contiguous(divide_file(whole)))
    spans = []
    for rank in reversed(range(ranks)):
        share = divide_file(parts_of(whole, rank, ranks) if partitioned else whole, rank, ranks)
        ranges, digest = write_share(tmp_path / "together", contiguous(share))
        content = (tmp_path / "together").read_bytes()
        assert digest == hashlib.sha256(b"".join(content[a:b] for a, b in ranges)).hexdigest()
        spans += ranges
        for name in share.whole:
            assert torch.equal(share.pieces[name].view(whole[name].shape), whole[name])
    assert (tmp_path / "together").read_bytes() == alone.read_bytes()
    assert sorted(spans)[0][0] == 0
    assert all(a[1] == b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))
    found = load(alone.read_bytes())
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def contiguous(share):
    share.pieces.update({name: piece.contiguous() for name, piece in share.pieces.items()})
    return share


def train_and_measure(mesh, folder: Path, **settings) -> dict[str, int]:
    """The bytes that this rank copied and wrote for the last checkpoint, without the random states."""
    import shardzoo.trainer.checkpointing.snapshot as snapshot

    write, written = snapshot.write_share, {}

    def noting(path, share):
        ranges, digest = write(path, share)
        written[path.name] = sum(b - a for a, b in ranges)
        return ranges, digest

    snapshot.write_share = noting
    try:
        run_training(mesh, folder, model=native_t5, data=Pairs(), **settings)
    finally:
        snapshot.write_share = write
    return written


LAYOUTS = {
    "DDP": {"env_type": "pytorchDDP"},
    "ZeRO 2": {"env_type": "deepspeed", "zero_stage": 2},
    "ZeRO 2 in bf16": {"env_type": "deepspeed", "zero_stage": 2, "precision": "bf16"},
    "ZeRO 3 in bf16": {"env_type": "deepspeed", "zero_stage": 3, "precision": "bf16"},
}


@pytest.mark.parametrize("name", by_turns(LAYOUTS, 2))
def test_replicas_write_equal_shares(run_mesh, tmp_path, name):
    """What they wrote together has every digest that its manifest and its state record."""
    settings = {"train_steps": 2, "global_batch_size": 6, **LAYOUTS[name]}
    by_rank = run_mesh(1, partial(train_and_measure, folder=tmp_path / "run", **settings), data=3)
    totals = [sum(written.values()) for written in by_rank]
    mean = sum(totals) / len(totals)
    assert max(abs(total - mean) for total in totals) < 0.05 * mean
    checkpoint = tmp_path / "run/checkpoints/step-000002"
    assert verify_checkpoint(checkpoint) == ""
    manifest = json.loads((checkpoint / "manifest.json").read_text())["tensors"]
    weights = load_file(checkpoint / "rank_00.safetensors")
    assert weights.keys() == manifest.keys()
    for tensor, record in manifest.items():
        content = weights[tensor].contiguous().view(torch.uint8).numpy().tobytes()
        assert record["sha256"] == [hashlib.sha256(content).hexdigest()], tensor
    for path in checkpoint.glob("*.safetensors"):
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 128
        path.write_bytes(bytes(damaged))
        assert path.name in verify_checkpoint(checkpoint)
        damaged[-1] ^= 128
        path.write_bytes(bytes(damaged))
