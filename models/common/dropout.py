"""Dropout on the residual stream."""

from __future__ import annotations

from ...mpu import Dropout, ParallelMesh
from .parallel_config import ParallelConfig


def residual_dropout(p: float, mesh: ParallelMesh | None, parallel_config: ParallelConfig) -> Dropout:
    """Dropout of [B, S, H], whose sequence is split under sequence parallelism."""
    return Dropout(p, split_dim=1 if parallel_config.sequence_parallel else None, mesh=mesh)
