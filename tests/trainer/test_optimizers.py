"""Optimizers that are not the trainer's own: what they keep is saved whole, wherever they keep it."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_optimizer
import torch
from safetensors.torch import load_file
from training import losses, run_training, tiny_t5

OPTIMIZERS = {
    "SGD": (lambda parameters: torch.optim.SGD(parameters, lr=0.1), "fp32"),
    "SGD with momentum": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), "fp32"),
    "Adagrad, whose state is there before the first step": (torch.optim.Adagrad, "bf16"),
    "NAdam": (torch.optim.NAdam, "bf16"),
    "Prodigy, which adapts its rate in its groups": (pytorch_optimizer.Prodigy, "fp32"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_byte_for_byte(tmp_path, name):
    make, precision = OPTIMIZERS[name]

    def train(folder: str, **arguments) -> list[float]:
        model = tiny_t5(0.1)
        updates = (make(model.parameters()), None)
        settings = {"precision": precision, "lr_schedule": "constant", "train_steps": 6, **arguments}
        steps, _ = run_training(None, tmp_path / folder, model=model, updates=updates, **settings)
        return losses(steps)

    whole = train("whole", save_interval=3)
    assert train("rest", load_dir=str(tmp_path / "whole" / "checkpoints" / "step-000003")) == whole[3:]
    saved = [tmp_path / folder / "checkpoints" / "step-000006" for folder in ("whole", "rest")]
    for file in sorted(path.name for path in saved[0].iterdir()):
        assert Path(saved[0], file).read_bytes() == Path(saved[1], file).read_bytes(), file
    if precision == "bf16":
        states = load_file(saved[0] / "optimizer_00.safetensors")
        assert all(value.dtype == torch.float32 for value in states.values())


def test_groups_keep_what_an_optimizer_writes_and_not_what_the_user_chose(tmp_path):
    """A weight decay that is chosen anew counts; the factor that Prodigy has adapted goes on."""
    made = []

    def train(folder: str, weight_decay: float, **arguments) -> None:
        model = tiny_t5()
        made.append(pytorch_optimizer.Prodigy(model.parameters(), weight_decay=weight_decay))
        settings = {"lr_schedule": "constant", "train_steps": 3, **arguments}
        run_training(None, tmp_path / folder, model=model, updates=(made[-1], None), **settings)

    train("first", 0.0)
    train("second", 0.5, load_dir=str(tmp_path / "first"), train_steps=3)
    first, second = (optimizer.param_groups[0] for optimizer in made)
    assert first["d_numerator"] != 0
    for name in ("step", "d_hat", "d_numerator"):
        assert second[name] == first[name], name
    assert second["weight_decay"] == 0.5


def test_another_number_of_groups_is_refused(tmp_path):
    model = tiny_t5()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    run_training(None, tmp_path, model=model, updates=(torch.optim.SGD(groups, lr=0.1), None), train_steps=1)
    with pytest.raises(ValueError, match="optimizer had 47 parameter groups, and this one has 2; make it as it was"):
        run_training(None, tmp_path, resume=True, train_steps=2)


def test_a_run_without_its_optimizer_cannot_go_on(tmp_path):
    run_training(None, tmp_path / "run", save_optim=False, train_steps=1)
    with pytest.raises(ValueError, match=r"without the optimizer's state .* load_dir, load_optim=False and another"):
        run_training(None, tmp_path / "run", resume=True, train_steps=2)
    weights = {"load_dir": str(tmp_path / "run"), "load_optim": False}
    steps, _ = run_training(None, tmp_path / "other", train_steps=2, **weights)
    assert [step["step"] for step in steps] == [1, 2]
