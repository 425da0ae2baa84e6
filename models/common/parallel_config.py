"""How a model's blocks run, which never changes what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from ...mpu import Dropout, ParallelMesh


@dataclass(frozen=True)
class ParallelConfig:
    """sequence_parallel: norms, dropouts and residuals hold a slice of the sequence each.

    recompute: what the backward pass computes again instead of keeping: nothing, attention's core, or blocks.
    """

    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"


class LayerArguments(TypedDict):
    """Arguments that norms, embeddings and parallel layers have in common."""

    mesh: ParallelMesh | None
    sequence_parallel: bool


def layer_arguments(mesh: ParallelMesh | None, parallel_config: ParallelConfig) -> LayerArguments:
    """The common arguments of the layers under a mesh and a `ParallelConfig`."""
    return {"mesh": mesh, "sequence_parallel": parallel_config.sequence_parallel}


def residual_dropout(p: float, mesh: ParallelMesh | None, parallel_config: ParallelConfig) -> Dropout:
    """Dropout of [B, S, H], whose sequence is split under sequence parallelism."""
    return Dropout(p, split_dim=1 if parallel_config.sequence_parallel else None, mesh=mesh)
