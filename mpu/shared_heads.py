"""Gathers the rows of key-value heads that several tensor-parallel ranks compute with.

With grouped queries, a number of ranks that does not divide the key-value heads shares them: each
row of their weight is held by one rank (`Shard.ranges`), and each rank computes with all rows of
the heads that its query heads attend to (`Shard.compute_ranges`). The ranks lend one another the
rows for the time of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .collectives import gather_from_tp
from .mesh import ParallelMesh
from .shard import Shard


def gather_shared_heads(
    weight: Tensor, bias: Tensor | None, shard: Shard, mesh: ParallelMesh
) -> tuple[Tensor, Tensor | None]:
    """Returns the rows of a weight and a bias that this rank computes with.

    The gradients of rows that were lent are summed and return to the ranks that hold them.

    Args:
        weight: [out/tp, in], the rows that this rank holds. Shared groups are the last ones.
        bias: [out/tp].
    """
    rank = mesh.tp_rank
    size = mesh.tp_size
    shared = shard.find_exchanged_groups(size)
    own_ranges = shard.ranges(rank, size)
    first = sum(stop - start for start, stop in own_ranges[: shared[0]])

    # The bias travels as one more column of the weight, so that there is one exchange.
    own = weight[first:]
    if bias is not None:
        own = torch.cat([own, bias[first:, None]], 1)
    whole = gather_groups(own, shard, shared, mesh, 0, partial_grad=True)

    starts = list(accumulate(shard.groups, initial=0))
    wanted = shard.compute_ranges(rank, size)
    rows: list[Tensor] = []
    for number, group in zip(shared, whole, strict=True):
        start, stop = wanted[number]
        rows.append(group[start - starts[number] : stop - starts[number]])
    if bias is None:
        return torch.cat([weight[:first], *rows]), None
    columns = weight.shape[1]
    weight_rows = [weight[:first], *(part[:, :columns] for part in rows)]
    bias_rows = [bias[:first], *(part[:, columns] for part in rows)]
    return torch.cat(weight_rows), torch.cat(bias_rows)


def gather_groups(
    part: Tensor,
    shard: Shard,
    groups: Sequence[int],
    mesh: ParallelMesh,
    dim: int,
    *,
    partial_grad: bool = False,
) -> list[Tensor]:
    """Gathers some groups of a shard, each whole.

    Args:
        part: This rank's rows of these groups along `dim`, one group after the other.
        groups: Their numbers.
        partial_grad: See `gather_from_tp`.
    """
    counts: list[list[int]] = []  # of rows, of each rank and group
    for rank in range(mesh.tp_size):
        ranges = shard.ranges(rank, mesh.tp_size)
        counts.append([ranges[group][1] - ranges[group][0] for group in groups])

    # All ranks must send equally many rows, and the first rank has the most.
    most = sum(counts[0])
    missing = most - part.shape[dim]
    if missing:
        shape = [*part.shape]
        shape[dim] = missing
        part = torch.cat([part, part.new_zeros(shape)], dim)
    gathered = gather_from_tp(part, mesh, dim, partial_grad=partial_grad)

    sizes: list[int] = []  # of each rank's groups, and of what it added
    for own in counts:
        sizes += [*own, most - sum(own)]
    pieces = torch.split(gathered, sizes, dim)
    stride = len(groups) + 1
    return [torch.cat(pieces[number::stride], dim) for number in range(len(groups))]
