"""Losses with weights and smoothing, in micro-batches, against one formula for the whole batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from shardzoo.finetuning.losses import WeightedLoss

CLASS_WEIGHTS = (0.5, 2.0, 1.5)
SMOOTHING = 0.1


@pytest.mark.parametrize("kind", ["classes", "words"])
def test_micro_batches_add_up_to_the_loss_of_the_batch(kind):
    """Each is divided by the targets of the whole batch, of which micro-batches have unequal numbers."""
    torch.manual_seed(0)
    shape = (6,) if kind == "classes" else (6, 4)
    logits = torch.randn(*shape, 3)
    labels = torch.randint(3, shape)
    if kind == "words":
        labels[:2, 1:] = -100
    weights = torch.rand(6) + 0.5
    count = (labels != -100).sum()
    compute = WeightedLoss(None, kind, False, False, None, SMOOTHING, CLASS_WEIGHTS)

    expected = torch.zeros(())
    for row in range(6):
        for place in range(labels[row].numel()):
            label = labels[row].flatten()[place]
            if label == -100:
                continue
            chances = F.log_softmax(logits[row].view(-1, 3)[place], -1)
            loss = -(1 - SMOOTHING) * chances[label] - SMOOTHING * chances.mean()
            expected = expected + weights[row] * CLASS_WEIGHTS[label] * loss

    def run_rows(start: int, stop: int, **more: torch.Tensor) -> torch.Tensor:
        batch = {"labels": labels[start:stop], "sample_weight": weights[start:stop], **more}
        return compute(batch, lambda: SimpleNamespace(logits=logits[start:stop]))["loss"]

    total = run_rows(0, 2, num_items_in_batch=count) + run_rows(2, 6, num_items_in_batch=count)
    torch.testing.assert_close(total, expected / count)
    torch.testing.assert_close(run_rows(0, 6), expected / count)
