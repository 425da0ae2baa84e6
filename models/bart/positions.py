"""Computes the position embeddings of BART and its relatives: learned, or sinusoids that skip
padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...mpu import ParallelMesh, cut_sequence, scatter_sequence
from ..blocks.embeddings import PositionEmbedding, check_positions
from ..blocks.masks import restart_positions

OFFSET = 2  # the first rows of the learned table belong to no position, as in fairseq


class LearnedPositions(PositionEmbedding):
    """A learned table, in which padding is counted like other tokens.

    Weight [OFFSET + positions, H].
    """

    def __init__(
        self,
        positions: int,
        hidden_size: int,
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(
            OFFSET + positions, hidden_size, sequence_parallel=sequence_parallel, mesh=mesh
        )

    def embed(
        self, ids: Tensor, cached: int, dtype: torch.dtype, pieces: Tensor | None = None
    ) -> Tensor:
        """Returns [B or 1, S, H], or [B or 1, S/tp, H] under sequence parallelism, for ids [B, S]
        after `cached` positions.

        Args:
            pieces: The number of each token's piece in packed rows, [B or 1, S]. The positions of
                each piece begin with the first.

        Raises:
            ValueError: The table has too few positions.
        """
        most = self.num_embeddings - OFFSET
        if pieces is not None:
            positions = restart_positions(pieces)
            check_positions(positions, 0, most)
            return self(positions + OFFSET)
        length = cached + ids.shape[1]
        check_positions(None, length, most)
        return self(torch.arange(cached + OFFSET, length + OFFSET, device=ids.device)[None])


class Sinusoids(nn.Module):
    """The base of positions that are computed and not stored."""

    def __init__(
        self, hidden_size: int, *, sequence_parallel: bool, mesh: ParallelMesh | None
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.sequence_parallel = sequence_parallel
        self.mesh = mesh

    def take_part(self, x: Tensor) -> Tensor:
        """Returns this rank's positions of x [B or 1, S, H]."""
        x = cut_sequence(x, self.mesh)
        return scatter_sequence(x, self.mesh) if self.sequence_parallel else x


class SinusoidalPositions(Sinusoids):
    """Sinusoids of the number of tokens so far; padding gets zeros. There is no limit to the
    length.

    The formula is that of tensor2tensor and transformers: the sines of all frequencies, then the
    cosines, where frequency i of H/2 is 10000^(-i / (H/2 - 1)).
    """

    def __init__(
        self,
        hidden_size: int,
        padding: int,
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(hidden_size, sequence_parallel=sequence_parallel, mesh=mesh)
        self.padding = padding

    def embed(
        self, ids: Tensor, cached: int, dtype: torch.dtype, pieces: Tensor | None = None
    ) -> Tensor:
        """Returns [B, S, H], or [B, S/tp, H] under sequence parallelism, for ids [B, S], or
        embeddings [B, S, H], after `cached` positions. See `LearnedPositions.embed` for `pieces`.
        """
        if ids.is_floating_point():
            # Of embeddings nobody knows which are padding.
            is_token = torch.ones_like(ids[..., 0], dtype=torch.bool)
        else:
            is_token = ids != self.padding  # [B, S]
        if pieces is None:
            counted = is_token.cumsum(1) + cached
        else:
            counted = restart_positions(pieces, is_token) + 1
        positions = counted * is_token + self.padding
        half = self.hidden_size // 2
        steps = torch.arange(half, device=ids.device).float()
        frequencies = torch.exp(steps * -(math.log(10000) / (half - 1)))
        angles = positions.unsqueeze(-1).float() * frequencies  # [B, S, H/2]
        x = torch.cat([angles.sin(), angles.cos()], dim=-1) * is_token.unsqueeze(-1)
        x = nn.functional.pad(x, (0, self.hidden_size % 2)).to(dtype)
        return self.take_part(x)


class PlacePositions(Sinusoids):
    """Sinusoids of the places in a row, in which padding is counted like other tokens.

    The formula is that of Vaswani et al. (2017, arXiv:1706.03762), with the sines of all
    frequencies before the cosines: frequency i is 10000^(-2i / H). transformers computes them in
    fp64, too, and rounds them to fp32.
    """

    def __init__(
        self,
        positions: int,
        hidden_size: int,
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(hidden_size, sequence_parallel=sequence_parallel, mesh=mesh)
        self.positions = positions

    def embed(
        self, ids: Tensor, cached: int, dtype: torch.dtype, pieces: Tensor | None = None
    ) -> Tensor:
        """Returns [B or 1, S, H], or [B or 1, S/tp, H] under sequence parallelism. The arguments and
        errors are those of `LearnedPositions.embed`.
        """
        if pieces is not None:
            places = restart_positions(pieces)
            check_positions(places, 0, self.positions)
        else:
            length = cached + ids.shape[1]
            check_positions(None, length, self.positions)
            places = torch.arange(cached, length, device=ids.device)[None]
        steps = torch.arange(0, self.hidden_size, 2, device=ids.device, dtype=torch.float64)
        frequencies = 10000 ** -(steps / self.hidden_size)
        angles = places.unsqueeze(-1).double() * frequencies  # [B or 1, S, H/2]
        cosines = angles.cos()[..., : self.hidden_size // 2]
        return self.take_part(torch.cat([angles.sin(), cosines], dim=-1).float().to(dtype))
