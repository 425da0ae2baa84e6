"""Moves the columns of logits from the layout of one mesh to that of another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import all_to_all_rows
from .mesh import ParallelMesh, tp_rank, tp_size

Columns = tuple[int, int]  # the first one, and the one after the last


@torch.no_grad()
def redistribute_columns(
    logits: Tensor, mesh: ParallelMesh | None, wanted: Sequence[Columns]
) -> Tensor:
    """Returns those columns of logits that this rank wants, of which its mesh's tensor-parallel
    ranks hold equally many each. Collective over these ranks.

    A rank sends no column to a rank that does not want it, and none is gathered. The gradient is
    not recorded.

    Args:
        logits: [..., Vp], this rank's columns.
        mesh: Its tensor axis splits the columns.
        wanted: For each rank of that axis the columns that it wants; an empty range for none.

    Returns:
        [..., W]. Columns after those that the ranks hold are zeros.
    """
    width = logits.shape[-1]
    own = tp_rank(mesh)
    size = tp_size(mesh)
    first = own * width
    sent: list[int] = []
    pieces: list[Tensor] = []
    for columns in wanted:
        start, stop = _intersect((first, first + width), columns)
        pieces.append(logits[..., start - first : stop - first])
        sent.append(stop - start)
    moved = pieces[own]
    if mesh is not None and size > 1:
        received: list[int] = []
        for rank in range(size):
            start, stop = _intersect((rank * width, (rank + 1) * width), wanted[own])
            received.append(stop - start)
        rows = torch.cat(pieces, -1).movedim(-1, 0)
        moved = all_to_all_rows(rows, sent, received, mesh.tp_group).movedim(0, -1)
    start, stop = wanted[own]
    return F.pad(moved, (0, stop - start - moved.shape[-1]))


def _intersect(held: Columns, wanted: Columns) -> Columns:
    """Returns the columns that are in both ranges; an empty range inside `held` if there are none."""
    start = max(held[0], wanted[0])
    stop = min(held[1], wanted[1])
    return (start, stop) if start < stop else (held[0], held[0])
