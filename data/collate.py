"""Samples to batches: torch tensors, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .labels import IGNORED

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PadBatch:
    """Stack samples (dicts of arrays) into `{name: tensor [B, …]}`, padding the last dimension where they
    differ.

    Labels are padded with −100 and everything else with 0, except `input_ids`, which get `pad_token_id`.
    Where a sample has no `attention_mask` of its own, one is added: int64 [B, S], 1 on tokens and 0 on
    padding.

    Args:
        pad_token_id: fills `input_ids`.
        lengths: fixed length of a name's last dimension, such as {"input_ids": 512, "labels": 128}; a longer
            sample is a ValueError. Other names are padded to the longest sample.
        multiple_of: padded lengths are rounded up to a multiple of this (8 suits tensor cores).
        attention_mask: whether to add the mask.
    """

    pad_token_id: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    multiple_of: int = 1
    attention_mask: bool = True

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        if not samples:
            raise ValueError("a batch needs at least one sample")
        batch = {name: torch.from_numpy(self._stack(name, samples)) for name in samples[0]}
        if self.attention_mask and "attention_mask" not in batch:
            sizes = torch.tensor([len(sample["input_ids"]) for sample in samples])
            batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[-1]) < sizes[:, None]).long()
        return batch

    def _stack(self, name: str, samples: Sequence[dict[str, Any]]) -> np.ndarray:
        values = [np.asarray(sample[name]) for sample in samples]
        if values[0].ndim == 0:
            return np.stack(values)  # [B]
        longest = max(value.shape[-1] for value in values)
        length = self.lengths.get(name) or -(-longest // self.multiple_of) * self.multiple_of
        if longest > length:
            raise ValueError(f"a sample has {longest} {name}, more than the fixed length {length}")
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED}.get(name, 0)
        out = np.full((len(values), *values[0].shape[:-1], length), fill, values[0].dtype)
        for row, value in zip(out, values, strict=True):
            row[..., : value.shape[-1]] = value
        return out
