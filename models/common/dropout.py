"""Dropout on the residual stream."""

from __future__ import annotations

from ...mpu import Dropout, ParallelMesh
from .execution import Execution


def residual_dropout(p: float, mesh: ParallelMesh | None, execution: Execution) -> Dropout:
    """Dropout of [B, S, H], whose sequence is split under sequence parallelism."""
    return Dropout(p, split_dim=1 if execution.sequence_parallel else None, mesh=mesh)
