"""Held-out loss over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..models.common.causal_lm import CausalLM
from ..mpu import ParallelMesh
from .batches import Batch, collate
from .coordination import sum_over


@torch.no_grad()
def evaluate(model: CausalLM, samples: Sequence[Batch], mesh: ParallelMesh, batch_size: int) -> float:
    """Mean loss in nats per target token over all samples, each evaluated once; the same number on every rank."""
    model.eval()
    device = next(model.parameters()).device
    loss, targets = 0.0, 0
    for first in range(mesh.dp_rank * batch_size, len(samples), mesh.dp_size * batch_size):
        batch = collate(samples[first : first + batch_size], device)
        loss += model(**batch, num_items_in_batch=1).loss.double().item()
        targets += int(model.count_targets(batch["labels"]))
    total_loss, total_targets = sum_over(mesh.dp_group, loss, targets)
    return total_loss / total_targets
