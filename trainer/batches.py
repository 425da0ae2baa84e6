"""Samples into batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Batch = dict[str, Tensor]


def collate(samples: Sequence[Batch], device: torch.device) -> Batch:
    """Samples of equal length -> one batch, [B, …] for each of their tensors, on the device."""
    return {name: torch.stack([sample[name] for sample in samples]).to(device) for name in samples[0]}
