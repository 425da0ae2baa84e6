"""Learned tables of positions or segments."""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from torch import Tensor, nn

from ...mpu import ParallelMesh, scatter_sequence


class PositionEmbedding(nn.Embedding):
    """A learned, replicated table of positions or segments. The row of `padding_idx` gets no
    gradient.

    Under sequence parallelism, each rank gets its slice of the output.
    """

    def __init__(
        self,
        positions: int,
        hidden_size: int,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(positions, hidden_size, padding_idx=padding_idx)
        self.sequence_parallel = sequence_parallel
        self.mesh = mesh

    def reset_parameters(self) -> None:
        """Does nothing: `initialize` sets the values, and sampling on the meta device would load
        PyTorch's compiler.
        """

    def forward(self, input: Tensor | range) -> Tensor:
        """Maps position ids [B, S] to [B, S, H], or [B, S/tp, H] under sequence parallelism; a
        range to [1, S, H].
        """
        x = (
            self.weight[input.start : input.stop][None]
            if isinstance(input, range)
            else super().forward(input)
        )
        return scatter_sequence(x, self.mesh) if self.sequence_parallel else x
