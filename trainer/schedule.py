"""The learning rate as a function of the step."""

from __future__ import annotations

import math


def warmup_cosine(step: int, *, peak: float, warmup_steps: int, total_steps: int, final_ratio: float = 0.1) -> float:
    """Linear warm-up to `peak`, then a cosine down to `final_ratio * peak` at the last step.

    step counts from 0; step 0 already has a learning rate above zero, and step `total_steps - 1` the lowest one.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return peak * (final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
