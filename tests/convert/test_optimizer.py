"""A training checkpoint moves to another number of ranks with its optimizer, and the run goes on there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from every_case import every_day
from safetensors.torch import load_file
from training import losses, native_t5, on_ranks

from shardzoo.checkpoint.folder_files import find_changed_files
from shardzoo.cli.convert import main
from shardzoo.convert.operations import Options, split
from shardzoo.trainer.run_folder import RunFolder

# Three ranks hold 4 heads and 64 features in unequal parts, and pad a vocabulary of 64 to 192 rows.
RUNS: dict[str, dict[str, Any]] = {
    "adam": {"env_type": "deepspeed+mpu", "zero_stage": 0},
    "bf16": {"env_type": "deepspeed+mpu", "zero_stage": 1, "precision": "bf16"},
    "adafactor": {
        "env_type": "deepspeed+mpu",
        "zero_stage": 0,
        "optimizer": "adafactor",
        "lr": 1e-3,
    },
    "stages": {"env_type": "deepspeed+mpu", "zero_stage": 0, "stages": 2},
}


def train(run_mesh: Any, folder: Path, size: int, **changes: Any) -> Any:
    sizes = {"model_parallel_size": size, "pipeline_parallel_size": changes.get("stages", 1)}
    settings = {"global_batch_size": 8, "train_steps": 4, "model": native_t5, **sizes, **changes}
    return on_ranks(run_mesh, folder, tp=size, **settings)


@pytest.fixture(scope="module")
def saved(run_mesh, tmp_path_factory):
    """`saved(name)`: the checkpoint of the second step of a run on two ranks."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            train(run_mesh, folder, 2, train_steps=2, **RUNS[name])
            made[name] = RunFolder(folder).checkpoint(2)
        return made[name]

    return make


@pytest.mark.parametrize(
    ("name", "size"),
    every_day([("stages", 1)], more=[("adafactor", 3), ("bf16", 1), ("adam", 3), ("adam", 1)]),
)
def test_a_run_goes_on_as_if_the_trainer_had_moved_it(
    name, size, saved, run_mesh, tmp_path, file_tree
):
    source = saved(name)
    before = file_tree(source)
    split(source, tmp_path / "moved", size, Options(with_optimizer=True))
    assert file_tree(source) == before
    assert not list(find_changed_files(tmp_path / "moved"))
    assert len(list((tmp_path / "moved").glob("optimizer_*.safetensors"))) == size
    assert not list((tmp_path / "moved").glob("random_*"))
    arguments = {key: value for key, value in RUNS[name].items() if key != "stages"}
    runs = [
        train(run_mesh, tmp_path / folder.name, size, load_dir=str(folder), **arguments)
        for folder in (source, tmp_path / "moved")
    ]
    for (steps, weights), (same_steps, same) in zip(*runs, strict=True):
        assert [step["step"] for step in steps] == [3, 4]
        assert losses(steps) == losses(same_steps)
        assert [step["grad_norm"] for step in steps] == [step["grad_norm"] for step in same_steps]
        assert all(torch.equal(value, same[key]) for key, value in weights.items())


def test_there_and_back_are_the_same_tensors(saved, tmp_path):
    source = saved("adam")
    assert (
        main(["reshard", str(source), str(tmp_path / "three"), "--tp", "3", "--with-optimizer"])
        == 0
    )
    assert (
        main(
            [
                "reshard",
                str(tmp_path / "three"),
                str(tmp_path / "two"),
                "--tp",
                "2",
                "--with-optimizer",
            ]
        )
        == 0
    )
    for name in (
        "optimizer_00.safetensors",
        "optimizer_01.safetensors",
        "rank_00.safetensors",
        "rank_01.safetensors",
    ):
        found, wanted = load_file(tmp_path / "two" / name), load_file(source / name)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items()), name
    states = [
        json.loads((folder / "trainer_state.json").read_text())
        for folder in (source, tmp_path / "two")
    ]
    for name in ("step", "consumed_samples", "data", "schedule", "optimizer", "groups"):
        assert states[0][name] == states[1][name]


def test_an_interrupted_one_is_resumed(saved, tmp_path, file_tree):
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > 2 * total // 3:
            raise Stop

    with pytest.raises(Stop):
        split(saved("adam"), tmp_path / "three", 3, Options(with_optimizer=True, jobs=1), stop)
    with pytest.raises(ValueError, match="other arguments"):
        split(saved("adam"), tmp_path / "three", 3, Options(resume=True))
    outcome = split(
        saved("adam"), tmp_path / "three", 3, Options(with_optimizer=True, resume=True, workers=2)
    )
    assert outcome.kept > 0
    split(saved("adam"), tmp_path / "fresh", 3, Options(with_optimizer=True))
    assert file_tree(tmp_path / "three") == file_tree(tmp_path / "fresh")
    again = split(saved("adam"), tmp_path / "fresh", 3, Options(with_optimizer=True, resume=True))
    assert again.kept == again.nbytes
    split(saved("adam"), tmp_path / "weights", 3)
    with pytest.raises(ValueError, match="of another conversion"):
        split(saved("adam"), tmp_path / "weights", 3, Options(with_optimizer=True, resume=True))


def flip(folder: Path) -> None:
    path = folder / "optimizer_01.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


MISTAKES: dict[str, tuple[Any, list[str], str]] = {
    "a flipped bit": (flip, [], "optimizer_01.safetensors has changed since it was written"),
    "a lost file": (
        lambda f: (f / "optimizer_01.safetensors").unlink(),
        [],
        "with 1 files of an optimizer's state",
    ),
    "no optimizer": (
        lambda f: [p.unlink() for p in f.glob("optimizer*")],
        [],
        "with 0 files of an optimizer's state",
    ),
    "no state": (lambda f: (f / "trainer_state.json").unlink(), [], "needs a training checkpoint"),
    "another format": (None, ["--to", "legacy"], "beside shards of shardzoo only"),
    "a type": (None, ["--dtype", "bfloat16"], "allows neither an adapter nor a dtype"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_refused_leaves_nothing(name, saved, tmp_path, capsys):
    change, words, message = MISTAKES[name]
    shutil.copytree(saved("adam"), tmp_path / "source")
    if change is not None:
        change(tmp_path / "source")
    arguments = [
        "reshard",
        str(tmp_path / "source"),
        str(tmp_path / "three"),
        "--tp",
        "4",
        "--with-optimizer",
        *words,
    ]
    assert main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert os.listdir(tmp_path) == ["source"]
