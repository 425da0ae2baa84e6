"""What is saved is the state at the step that it names, however long copying and writing take meanwhile."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import run_training

STEPS = 5


class Normed(torch.nn.Module):
    """Parameters change in updates, and the statistics of its normalization in forward passes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(64, 16)
            self.norm = torch.nn.BatchNorm1d(16)
            self.head = torch.nn.Linear(16, 64)

    def forward(self, input_ids, labels, **_):
        hidden = self.norm(self.embedding(input_ids).transpose(1, 2))
        logits = self.head(hidden.transpose(1, 2))
        return {
            "loss": torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels),
            "logits": logits,
        }


def slowly(work):
    def delayed(*arguments, **keywords):
        time.sleep(0.1)  # some steps' time
        return work(*arguments, **keywords)

    return delayed


def train(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """The model's tensors after each step; every step is saved."""
    model, states = Normed(), {}

    def on_step(step: int, loss: float) -> None:
        states[step] = {name: value.clone() for name, value in model.state_dict().items()}

    run_training(None, folder, model=model, on_step=on_step, train_steps=STEPS, save_interval=1)
    return states


def files(folder: Path) -> dict[str, bytes]:
    found = sorted(folder.glob("checkpoints/*/*"))
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in found}


@pytest.mark.parametrize("late", ["copying", "writing"])
def test_checkpoints_are_of_their_steps_while_training_goes_on(tmp_path, monkeypatch, late):
    import shardzoo.trainer.checkpointing.snapshot as snapshot
    from shardzoo.trainer.checkpointing.saver import BackgroundSaver
    from shardzoo.trainer.checkpointing.staging_buffers import StagingBuffers

    with monkeypatch.context() as patch:
        save = BackgroundSaver.save
        patch.setattr(
            BackgroundSaver, "save", lambda self, taken: (save(self, taken), self.wait())[0]
        )
        train(tmp_path / "in turn")
    owner, name = (StagingBuffers, "copy") if late == "copying" else (snapshot, "write_share")
    monkeypatch.setattr(owner, name, slowly(getattr(owner, name)))
    states = train(tmp_path / "meanwhile")
    assert not torch.equal(states[1]["norm.running_mean"], states[2]["norm.running_mean"])
    assert not torch.equal(states[1]["head.weight"], states[2]["head.weight"])
    for step, state in states.items():
        saved = load_file(tmp_path / f"meanwhile/checkpoints/step-{step:06d}/model.safetensors")
        assert saved.keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(saved[key], value), (step, key)
    assert files(tmp_path / "meanwhile") == files(tmp_path / "in turn")


def statistics(mesh, folder: Path, **arguments) -> torch.Tensor:
    model = Normed()
    run_training(mesh, folder, model=model, data=Equal(), train_steps=STEPS, **arguments)
    return model.norm.running_mean


class Equal:
    """Samples of one length."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.flip(0)}


def test_replicas_keep_the_same_statistics(run_mesh, tmp_path):
    """Those of the first one, in every engine, so that an evaluation is the same after a run went on."""
    arguments = {"pytorchDDP": {}, "deepspeed": {"zero_stage": 2}}
    found = {}
    for name, more in arguments.items():
        work = partial(statistics, folder=tmp_path / name, env_type=name, **more)
        first, second = run_mesh(1, work, data=2)
        saved = load_file(tmp_path / name / f"checkpoints/step-{STEPS:06d}/model.safetensors")[
            "norm.running_mean"
        ]
        assert torch.equal(first, saved)
        found[name] = (first, second)
    assert torch.equal(*found["deepspeed"])
    torch.testing.assert_close(found["deepspeed"][0], found["pytorchDDP"][0])


def test_a_step_is_not_held_up_by_writing(tmp_path, monkeypatch):
    """Updates go on while a file is not written yet."""
    import shardzoo.trainer.checkpointing.snapshot as snapshot

    write, updated, seen = snapshot.write_share, threading.Event(), []

    def waiting(path, share):
        seen.append(updated.wait(30))
        return write(path, share)

    monkeypatch.setattr(snapshot, "write_share", waiting)

    def on_step(step: int, loss: float) -> None:
        if step == 2:
            updated.set()

    run_training(None, tmp_path, model=Normed(), on_step=on_step, train_steps=2, save_interval=1)
    assert all(seen)
