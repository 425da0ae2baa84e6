"""Learned tables of positions or segments."""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

import torch
from torch import Tensor, nn

from ...mpu import ParallelMesh, VocabParallelEmbedding, cut_sequence, scatter_sequence
from ...ops.device import can_overwrite_gradients, host_can_read


class PositionEmbedding(nn.Embedding):
    """A learned, replicated table of positions or segments. The row of `padding_idx` gets no
    gradient.

    Under sequence and context parallelism, each rank gets its part of the output.
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
        if isinstance(input, range):
            # Without gradients, a view of a parameter would still ask for one, which has no function;
            # PyTorch's module tracker, with which FLOPs are counted, stops there.
            table = self.weight if torch.is_grad_enabled() else self.weight.detach()
            x = cut_sequence(table[input.start : input.stop][None], self.mesh)
        else:
            x = super().forward(cut_sequence(input, self.mesh))
        return scatter_sequence(x, self.mesh) if self.sequence_parallel else x


def embed_tokens(
    embedding: VocabParallelEmbedding, tokens: Tensor, table: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns the embeddings of tokens, [B, S, H] or [B, S/tp, H] under sequence parallelism, and
    the table for its next use; see `VocabParallelEmbedding.embed`.

    Args:
        tokens: int64 [B, S], or their embeddings [B, S, H], whole on each rank.
    """
    if not tokens.is_floating_point():
        return embedding.embed(tokens, table)
    tokens = cut_sequence(tokens, embedding.mesh)
    if embedding.sequence_parallel:
        tokens = scatter_sequence(tokens, embedding.mesh)
    return tokens, table


def check_positions(position_ids: Tensor | None, length: int, most: int) -> None:
    """Raises ValueError if a call needs more positions than a table has.

    Args:
        position_ids: int64 [B, S], which the host reads where it need not wait for them.
        length: The length of the sequences, which counts if the ids are not given or not read.
        most: The positions of the table.
    """
    needed = length
    if position_ids is not None and host_can_read(position_ids) and can_overwrite_gradients():
        needed = int(position_ids.max()) + 1
    if needed > most:
        raise ValueError(
            f"the sequence has {needed} tokens, but the model has only {most} positions"
        )
