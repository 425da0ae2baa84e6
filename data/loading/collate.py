"""Collates samples, which are dicts of arrays, into batches of tensors, and pads those of unequal
lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..labels import IGNORED

Batch = dict[str, Tensor]
CollateFunction = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class PadBatch:
    """Stacks samples (dicts of arrays) into `{name: tensor [B, …]}`.

    The last dimension is padded if lengths differ.

    `input_ids` are padded with `pad_token_id`, labels with −100, and everything else with 0. If the
    samples have no `attention_mask`, one is added: int64 in the shape of `input_ids`, 1 on tokens
    and 0 on padding.

    Args:
        pad_token_id: Padding of `input_ids`.
        lengths: Fixed length of a name's last dimension, such as {"input_ids": 512, "labels": 128};
            a longer sample is a ValueError. Other names are padded to the longest sample.
        multiple_of: Padded lengths are rounded up to a multiple of this (8 suits tensor cores;
            sequence parallelism needs its number of ranks). It does not apply to labels that are no
            integers.
        attention_mask: Whether to add the mask.
    """

    pad_token_id: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    multiple_of: int = 1
    attention_mask: bool = True

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        if not samples:
            raise ValueError("a batch needs at least one sample")
        check_names(samples)
        rows = {name: [np.asarray(sample[name]) for sample in samples] for name in samples[0]}
        batch = {name: self._stack(name, values) for name, values in rows.items()}
        if self.attention_mask and "attention_mask" not in batch and "input_ids" in batch:
            tokens = [np.ones_like(value, np.int64) for value in rows["input_ids"]]
            batch["attention_mask"] = _pad(tokens, batch["input_ids"].shape[-1], fill=0)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _stack(self, name: str, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the values of one name, padded to one length: [B, …]."""
        first = values[0]
        for row, value in enumerate(values):
            if value.ndim != first.ndim or value.shape[:-1] != first.shape[:-1]:
                raise ValueError(
                    f"{name!r} has shape {first.shape} in the first sample of a batch and "
                    f"{value.shape} in sample {row} (from 0); they may differ in the last "
                    "dimension only"
                )
        if first.ndim == 0:
            return np.stack(values)  # [B]
        longest = max(value.shape[-1] for value in values)
        length = self.lengths.get(name)
        if not length:
            is_real_label = name == "labels" and first.dtype.kind == "f"
            multiple = 1 if is_real_label else self.multiple_of
            length = -(-longest // multiple) * multiple
        if longest > length:
            raise ValueError(f"a sample has {longest} {name}, more than the fixed length {length}")
        fills = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return _pad(values, length, fills.get(name, 0))


class DataCollator:
    """Collates the samples of a user's dataset: stacks those of equal length, and pads the others.

    Samples of unequal lengths are padded on the right (labels with −100), and get an attention
    mask; so are tokens and labels whose length is no multiple of `multiple_of`. Integers become
    int64, which embeddings and losses need. Python's floats become float32.
    """

    def __init__(self, pad_token_id: int, multiple_of: int = 1) -> None:
        self._pad_batch = PadBatch(pad_token_id, multiple_of=multiple_of)

    def __call__(self, samples: Sequence[Any]) -> Batch:
        for sample in samples:
            if not isinstance(sample, Mapping):
                raise ValueError(
                    f"a sample must be a dict of arrays, not a {type(sample).__name__}; "
                    "pass a collate_fn"
                )
        check_names(samples)
        rows: dict[str, list[np.ndarray]] = {}
        for name in samples[0]:
            values = [_as_array(name, sample[name]) for sample in samples]
            rows[name] = _cast_to_one_dtype(values)
        if any(self._needs_padding(name, values) for name, values in rows.items()):
            padded_samples = [
                {name: values[row] for name, values in rows.items()} for row in range(len(samples))
            ]
            return self._pad_batch(padded_samples)
        return {name: torch.from_numpy(np.stack(values)) for name, values in rows.items()}

    def _needs_padding(self, name: str, values: Sequence[np.ndarray]) -> bool:
        first = values[0]
        if any(value.shape != first.shape for value in values):
            return True
        is_token_label = name == "labels" and first.dtype.kind == "i" and first.ndim > 0
        is_sequence = name == "input_ids" or is_token_label
        return is_sequence and first.shape[-1] % self._pad_batch.multiple_of > 0


def with_loss_mask(collate: CollateFunction) -> CollateFunction:
    """Returns a collate function whose batches have labels of −100 in place of Megatron's
    `loss_mask` of 0.
    """

    def collate_with_loss_mask(samples: Sequence[Any]) -> Any:
        batch = collate(samples)
        if isinstance(batch, dict) and "loss_mask" in batch and "labels" in batch:
            is_ignored = batch.pop("loss_mask") == 0
            batch["labels"] = batch["labels"].masked_fill(is_ignored, IGNORED)
        return batch

    return collate_with_loss_mask


def check_names(samples: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless all samples of a batch have the same names."""
    for row, sample in enumerate(samples):
        for name in samples[0].keys() ^ sample.keys():
            lacking, having = (row, 0) if name in samples[0] else (0, row)
            raise ValueError(
                f"sample {lacking} of a batch (from 0) has no {name!r}, which sample {having} has; "
                "give it to all samples, or to none"
            )


def find_common_dtype(values: Sequence[np.ndarray]) -> np.dtype:
    """Returns the dtype that holds all arrays.

    Empty ones are ignored, because numpy makes an empty list float64.
    """
    dtypes = [value.dtype for value in values if value.size]
    if not dtypes:
        dtypes = [value.dtype for value in values]
    return np.result_type(*dtypes)


def _pad(values: Sequence[np.ndarray], length: int, fill: int) -> np.ndarray:
    """Returns arrays [..., n], padded on the right to one length: [B, ..., length]."""
    shape = (len(values), *values[0].shape[:-1], length)
    padded = np.full(shape, fill, find_common_dtype(values))
    for row, value in zip(padded, values, strict=True):
        row[..., : value.shape[-1]] = value
    return padded


def _as_array(name: str, value: Any) -> np.ndarray:
    """Returns a sample's value as an array. Raises ValueError unless it holds numbers."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:  # NumPy has no bfloat16.
            value = value.float()
        value = value.numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(
            f"the samples' {name!r} holds lists of unequal lengths: {value!r:.60}; "
            "pad them, or pass a collate_fn"
        ) from None
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"the samples' {name!r} must hold numbers, not {value!r:.60}; "
            "remove it, or pass a collate_fn"
        )
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    # Python's own floats are float64 to NumPy; an array of float64 was made so on purpose.
    if array.dtype == np.float64 and not isinstance(value, (np.ndarray, np.generic)):
        return array.astype(np.float32)
    return array


def _cast_to_one_dtype(values: list[np.ndarray]) -> list[np.ndarray]:
    dtype = find_common_dtype(values)
    if dtype == np.float64 and all(value.dtype != dtype for value in values):
        # NumPy promotes int64 and float32 to float64; torch promotes them to float32.
        dtype = np.dtype(np.float32)
    return [value.astype(dtype, copy=False) for value in values]
