"""accelerate prepares, trains and saves the zoo's models as it does transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from tiny_models import save_model
from torch.utils.data import DataLoader

import shardzoo

CLASSES = ("GPT2LMHeadModel", "T5ForConditionalGeneration")


def train(model: Any, folder: Path) -> list[float]:
    """Returns the losses of eight batches in four optimizer steps, and saves the model."""
    # Another test of this process may have begun in another precision.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="no", gradient_accumulation_steps=2
    )
    rows = [
        {"input_ids": torch.arange(3 + i, 12 + i), "labels": torch.arange(3 + i, 12 + i)}
        for i in range(16)
    ]
    # Adam would turn the rounding of gradients that are zero, such as of key biases, into steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)
    loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[reportArgumentType]
    model, optimizer, loader, schedule = accelerator.prepare(
        model.eval(), optimizer, loader, schedule
    )
    losses: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses += accelerator.gather_for_metrics(loss.detach()[None]).tolist()
    accelerator.unwrap_model(model).save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    return losses


@pytest.mark.parametrize("name", CLASSES)
def test_losses_and_saved_weights_are_those_of_transformers(name, tmp_path):
    kind = name.partition("LM")[0].partition("For")[0].lower()
    folder = save_model(tmp_path / "model", name, kind, seed=1)
    architecture = getattr(transformers, name)
    wanted = train(architecture.from_pretrained(folder), tmp_path / "theirs")
    assert wanted[-1] < wanted[0]
    found = train(shardzoo.from_pretrained(folder), tmp_path / "ours")
    assert found == pytest.approx(wanted, rel=1e-4)
    theirs = architecture.from_pretrained(tmp_path / "theirs").state_dict()
    ours = architecture.from_pretrained(tmp_path / "ours").state_dict()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-4)
