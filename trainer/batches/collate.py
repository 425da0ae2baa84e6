"""Collates samples into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data import PadBatch
from ...data.loading.loader import check_names, common_dtype

Batch = dict[str, Tensor]


def collate(samples: Sequence[Batch], device: torch.device) -> Batch:
    """Stacks samples of equal length into one batch on the device; each tensor becomes [B, …]."""
    return {name: torch.stack([sample[name] for sample in samples]).to(device) for name in samples[0]}


class DefaultCollate:
    """Collates samples. It stacks samples of equal length.

    Samples of unequal lengths are padded on the right (labels with -100), and get an attention mask. Integers become
    int64, which embeddings and losses need. Python's floats become float32.
    """

    def __init__(self, pad_token_id: int) -> None:
        self._pad = PadBatch(pad_token_id)

    def __call__(self, samples: Sequence[Any]) -> Batch:
        for sample in samples:
            if not isinstance(sample, Mapping):
                raise ValueError(f"a sample must be a dict of arrays, not a {type(sample).__name__}; pass a collate_fn")
        check_names(samples)
        rows = {name: _of_one_dtype([_array(name, sample[name]) for sample in samples]) for name in samples[0]}
        if any(value.shape != values[0].shape for values in rows.values() for value in values):
            return self._pad([dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)])
        return {name: torch.from_numpy(np.stack(values)) for name, values in rows.items()}


def is_table(value: Any) -> bool:
    """Returns whether `value` is a data frame, whose length counts rows but whose items are columns."""
    return type(value).__module__.split(".")[0] in ("pandas", "polars", "pyarrow")


def _array(name: str, value: Any) -> np.ndarray:
    """Returns a sample's value as an array. Raises ValueError unless it holds numbers."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # NumPy has no bfloat16
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(
            f"the samples' {name!r} holds lists of unequal lengths: {value!r:.60}; pad them, or pass a collate_fn"
        ) from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"the samples' {name!r} must hold numbers, not {value!r:.60}; remove it, or pass a collate_fn")
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    if array.dtype == np.float64 and not isinstance(value, (np.ndarray, np.generic)):
        return array.astype(np.float32)
    return array


def _of_one_dtype(values: list[np.ndarray]) -> list[np.ndarray]:
    dtype = common_dtype(values)
    if dtype == np.float64 and all(value.dtype != dtype for value in values):
        dtype = np.dtype(np.float32)  # the type to which torch promotes integers and float32
    return [value.astype(dtype, copy=False) for value in values]
