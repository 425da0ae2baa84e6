"""Configures how a model's blocks run. The settings do not change what the blocks compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from ..mpu import ParallelMesh

Recompute = Literal["none", "selective", "full", "offload"]
WHOLE_BLOCKS: tuple[Recompute, ...] = ("full", "offload")
"""Those that recompute whole blocks."""
ContextExchange = Literal["auto", "heads", "keys", "ring"]


@dataclass(frozen=True)
class ParallelConfig:
    """How a model's blocks run.

    Attributes:
        sequence_parallel: Each rank's norms, dropouts and residuals process a slice of the
            sequence.
        recompute: What the backward pass recomputes to save memory: nothing, the attention core, or
            whole blocks; with "offload", the inputs of the blocks wait in the host's memory.
        pipeline_blocks: The number of blocks of each pipeline stage; by default, equal numbers.
        context_exchange: What context-parallel ranks exchange in attention: heads (all-to-all of
            queries, keys, values and results), keys and values (gathered, or passed around a ring),
            or heads wherever the numbers of heads and ranks allow it, else gathered keys (auto).
    """

    sequence_parallel: bool = False
    recompute: Recompute = "none"
    pipeline_blocks: tuple[int, ...] | None = None
    context_exchange: ContextExchange = "auto"


class LayerArguments(TypedDict):
    """The arguments that norms, embeddings and parallel layers share."""

    mesh: ParallelMesh | None
    sequence_parallel: bool


def layer_arguments(mesh: ParallelMesh | None, parallel_config: ParallelConfig) -> LayerArguments:
    """Returns the shared arguments of the layers for a mesh and a `ParallelConfig`."""
    return {"mesh": mesh, "sequence_parallel": parallel_config.sequence_parallel}
