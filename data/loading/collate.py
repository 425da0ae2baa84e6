"""Samples to batches: torch tensors, padded on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..objectives.labels import IGNORED

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PadBatch:
    """Stack samples (dicts of arrays) into `{name: tensor [B, …]}`, padding the last dimension where they
    differ.

    Labels are padded with −100 and everything else with 0, except `input_ids`, which get `pad_token_id`.
    Where a sample has no `attention_mask` of its own, `input_ids` get one: int64 of their shape, 1 on tokens
    and 0 on padding.

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

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        if not samples:
            raise ValueError("a batch needs at least one sample")
        check_names(samples)
        rows = {name: [np.asarray(sample[name]) for sample in samples] for name in samples[0]}
        batch = {name: self._stack(name, values) for name, values in rows.items()}
        if self.attention_mask and "attention_mask" not in batch and "input_ids" in batch:
            tokens = [np.ones_like(value, np.int64) for value in rows["input_ids"]]
            batch["attention_mask"] = _pad(tokens, batch["input_ids"].shape[-1], 0)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _stack(self, name: str, values: Sequence[np.ndarray]) -> np.ndarray:
        for row, value in enumerate(values):
            if value.ndim != values[0].ndim or value.shape[:-1] != values[0].shape[:-1]:
                raise ValueError(
                    f"{name!r} has shape {values[0].shape} in the first sample of a batch and {value.shape} in sample "
                    f"{row} (from 0); they may differ in the last dimension alone"
                )
        if values[0].ndim == 0:
            return np.stack(values)  # [B]
        longest = max(value.shape[-1] for value in values)
        length = self.lengths.get(name) or -(-longest // self.multiple_of) * self.multiple_of
        if longest > length:
            raise ValueError(f"a sample has {longest} {name}, more than the fixed length {length}")
        return _pad(values, length, {"input_ids": self.pad_token_id, "labels": IGNORED}.get(name, 0))


def check_names(samples: Sequence[Mapping[str, Any]]) -> None:
    """ValueError unless all samples of a batch have the same names."""
    for row, sample in enumerate(samples):
        for name in samples[0].keys() ^ sample.keys():
            lacking, having = (row, 0) if name in samples[0] else (0, row)
            raise ValueError(
                f"sample {lacking} of a batch (from 0) has no {name!r}, which sample {having} has; give it to all "
                "samples, or to none"
            )


def common_dtype(values: Sequence[np.ndarray]) -> np.dtype:
    """What holds all of them; empty ones have no say, for Python's empty lists are of float64."""
    return np.result_type(*([value.dtype for value in values if value.size] or [value.dtype for value in values]))


def _pad(values: Sequence[np.ndarray], length: int, fill: int) -> np.ndarray:
    out = np.full((len(values), *values[0].shape[:-1], length), fill, common_dtype(values))
    for row, value in zip(out, values, strict=True):
        row[..., : value.shape[-1]] = value
    return out
