"""The two-layer feed-forward block, split over its inner width."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import ColumnParallelLinear, ParallelMesh, RowParallelLinear
from .execution import Execution

# transformers' names; "gelu_new" and its like are the tanh approximation.
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        mesh: ParallelMesh | None = None,
        execution: Execution,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
        self.activation = ACTIVATIONS[activation]
        sequence_parallel = execution.sequence_parallel
        self.up = ColumnParallelLinear(hidden_size, inner_size, sequence_parallel=sequence_parallel, mesh=mesh)
        self.down = RowParallelLinear(inner_size, hidden_size, sequence_parallel=sequence_parallel, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        return self.down(self.activation(self.up(x)))
