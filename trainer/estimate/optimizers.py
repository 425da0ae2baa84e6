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


def step_bytes(optimizer: str, elements: Sequence[int], device: str) -> int:
    """Temporary fp32 tensors, of what the optimizer updates at once: a parameter, a flat partition of ZeRO's, or on
    CUDA, where pytorch_optimizer takes a whole group together, everything. AdamW is fused and needs none."""
    if optimizer == "adamw" or not elements:
        return 0
    together = sum(elements) if device == "cuda" and optimizer in ("lion", "lamb") else max(elements)
    return TEMPORARIES[optimizer] * FP32 * together


TEMPORARIES = {"adafactor": 2, "lion": 1, "lamb": 2}


def _factored(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
