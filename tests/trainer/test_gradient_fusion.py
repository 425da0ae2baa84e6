"""Training whose linear layers add their weights' gradients to fp32 sums, beside training that does not."""

from __future__ import annotations

import pytest
import torch
from every_case import by_turns
from training import native_t5, run_training

from shardzoo.mpu import main_gradients
from shardzoo.trainer import TrainingArguments


def train(mesh, folder, fuses, **options):
    """Returns the losses and the final weights, and how many gradients products have added."""
    added = []
    add = main_gradients.MainGradient.add

    def count(main, *arguments):
        added.append(main)
        add(main, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main_gradients.MainGradient, "add", count)
        reported, weights = run_training(
            mesh, folder, model=native_t5, train_steps=3, gradient_accumulation_steps=3,
            gradient_accumulation_fusion=fuses, dropout=0.1, **options,
        )  # fmt: skip
    return [values["loss"] for values in reported], weights, len(added)


@pytest.mark.parametrize("precision", by_turns(["bf16", "fp32"], 2))
def test_losses_are_those_of_gradients_that_are_added_afterwards(precision, tmp_path):
    losses, weights, added = train(None, tmp_path / "fused", True, precision=precision)
    expected, others, none = train(None, tmp_path / "added", False, precision=precision)
    assert none == 0
    assert added > 0
    assert added % 9 == 0  # in each micro-batch of each step
    close = {"rtol": 1e-5, "atol": 1e-5} if precision == "fp32" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(losses, expected, **close)
    if precision == "fp32":
        torch.testing.assert_close(weights, others, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", by_turns(["bf16", "fp32"], 2))
def test_ranks_exchange_what_the_products_have_added(precision, tmp_path, run_mesh):
    arguments = {"env_type": "pytorchDDP", "precision": precision}
    fused = run_mesh(1, train, tmp_path / "fused", True, data=2, **arguments)
    expected = run_mesh(1, train, tmp_path / "added", False, data=2, **arguments)
    close = {"rtol": 1e-5, "atol": 1e-5} if precision == "fp32" else {"rtol": 2e-2, "atol": 2e-2}
    for (losses, _, added), (others, _, _) in zip(fused, expected, strict=True):
        assert added > 0
        assert added % 6 == 0  # but for the last micro-batch of each step
        torch.testing.assert_close(losses, others, **close)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"env_type": "fsdp"}, "env_type='fsdp'"),
        ({"env_type": "deepspeed"}, "env_type='deepspeed'"),
        ({"torch_compile": True}, "torch_compile"),
    ],
)
def test_what_takes_gradients_from_the_parameters_is_refused(options, name):
    with pytest.raises(
        ValueError, match=f"gradient_accumulation_fusion=True does not work with {name}"
    ):
        TrainingArguments(gradient_accumulation_fusion=True, **options)
