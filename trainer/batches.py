"""Samples into batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import PadBatch

Batch = dict[str, Tensor]


def collate(samples: Sequence[Batch], device: torch.device) -> Batch:
    """Samples of equal length -> one batch, [B, …] for each of their tensors, on the device."""
    return {name: torch.stack([sample[name] for sample in samples]).to(device) for name in samples[0]}


class DefaultCollate:
    """Stacks samples of equal lengths as they are; pads others on the right, labels with -100, and adds a mask."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad = PadBatch(pad_token_id)

    def __call__(self, samples: Sequence[Any]) -> Batch:
        if not isinstance(samples[0], dict):
            raise ValueError(f"a sample must be a dict of arrays, not a {type(samples[0]).__name__}; pass a collate_fn")
        arrays = [{name: np.asarray(value) for name, value in sample.items()} for sample in samples]
        for name, array in arrays[0].items():
            if array.dtype.kind not in "biuf":
                text = f"{samples[0][name]!r:.60}"
                raise ValueError(f"the samples' {name!r} holds no numbers but {text}; drop it, or pass a collate_fn")
        if any(array[name].shape != arrays[0][name].shape for array in arrays for name in arrays[0]):
            return self._pad(arrays)
        return {name: torch.from_numpy(np.stack([array[name] for array in arrays])) for name in arrays[0]}
