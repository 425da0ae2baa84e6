"""How a model's blocks run, which never changes what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelConfig:
    """sequence_parallel: norms, dropouts and residuals hold a slice of the sequence each.

    recompute: what the backward pass computes again instead of keeping: nothing, attention's core, or blocks.
    """

    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
