"""The optimizer's memory: its state, and what exists while it updates."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

STATE_BYTES = {"adamw": 8, "lamb": 8, "lion": 4}
"""For each element, in fp32: two moments (Loshchilov & Hutter 2019; You et al. 2020), or one (Chen et al. 2023)."""
FP32 = 4


def state_bytes(optimizer: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Of parameters of these shapes.

    Adafactor (Shazeer & Stern 2018, section 3) keeps a row's and a column's mean of each matrix's squared gradients,
    and those of a vector whole.
    """
    if optimizer == "adafactor":
        return FP32 * sum(map(_factored, shapes))
    return STATE_BYTES[optimizer] * sum(map(prod, shapes))


def step_bytes(optimizer: str, groups: Sequence[Sequence[int]]) -> int:
    """Temporary fp32 tensors while parameters of so many elements, group by group, are updated.

    AdamW is fused and needs none. transformers' Adafactor needs two of a parameter's size at once, pytorch_optimizer's
    Lion and LAMB one for each parameter of a group, which they update together.
    """
    if optimizer == "adafactor":
        return 2 * FP32 * max((size for group in groups for size in group), default=0)
    return FP32 * max(map(sum, groups), default=0) if optimizer in ("lion", "lamb") else 0


def _factored(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
