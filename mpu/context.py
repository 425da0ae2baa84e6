"""Splits sequences over the ranks of the context axis, and lets these ranks attend to one another.

Rank c of C holds the positions [c·S/C, (c+1)·S/C) of every sequence, in every layer. A model is
called with whole sequences of token ids, labels and masks, which are small, on all of these ranks
alike; `cut_sequence` alone takes the rank's part of them. So positions, shifted labels, masks and
counts are those of the whole sequence, by construction.

| function               | forward                            | backward                           |
|------------------------|------------------------------------|------------------------------------|
| `cut_sequence`         | this rank's positions              | zeros elsewhere                    |
| `gather_from_context`  | all-gather                         | reduce-scatter                     |
| `exchange_heads`       | all-to-all                         | the reverse all-to-all             |
| `restore_heads`        | the reverse all-to-all             | the all-to-all                     |
| `reduce_from_context`  | all-reduce                         | identity                           |
| `share_gradient`       | identity                           | the gradient divided by C          |

Parameters are replicated over the context axis. Each rank computes the part of their gradients that
its positions contribute, and the engine sums the parts, as it sums over data-parallel ranks. What
every context rank computes alike, such as the loss of a classifier, passes `share_gradient`, so that
the sum counts it once.

The exchange of heads is that of DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509).
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.autograd import Function
from ..ops.device import records_graph
from ..ops.registration import LIBRARY
from .collectives import (
    SEQUENCE_DIM,
    Finish,
    find_group,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from .mesh import ParallelMesh


def context_size(mesh: ParallelMesh | None) -> int:
    """Returns the number of ranks that share each sequence; 1 without a mesh."""
    return 1 if mesh is None else mesh.cp_size


def context_rank(mesh: ParallelMesh | None) -> int:
    """Returns this process's rank along the context axis; 0 without a mesh."""
    return 0 if mesh is None else mesh.cp_rank


@contextmanager
def whole_sequences(mesh: ParallelMesh | None) -> Generator[None]:
    """Lets each context rank compute whole sequences by itself within the context.

    It can, because it holds all parameters. Decoding needs it, whose caches are of whole sequences.
    """
    if mesh is None or mesh.cp_size == 1:
        yield
        return
    place = (mesh.cp_size, mesh.cp_rank)
    mesh.cp_size = 1
    mesh.cp_rank = 0
    try:
        yield
    finally:
        mesh.cp_size, mesh.cp_rank = place


def cut_sequence(tensor: Tensor, mesh: ParallelMesh | None, dim: int = SEQUENCE_DIM) -> Tensor:
    """Returns this rank's positions of a tensor that has whole sequences along `dim`.

    Raises:
        ValueError: The context-parallel size does not divide the length.
    """
    if mesh is None or mesh.cp_size == 1:
        return tensor
    length = tensor.shape[dim]
    share = divide_sequence(length, mesh.cp_size)
    return tensor.narrow(dim, mesh.cp_rank * share, share)


def divide_sequence(length: int, ranks: int) -> int:
    """Returns the number of positions of each context rank.

    Raises:
        ValueError: They cannot have equally many.
    """
    if length % ranks:
        raise ValueError(
            f"a sequence of {length} positions cannot be split over {ranks} context-parallel "
            f"ranks; pad it to a multiple of {ranks}"
        )
    return length // ranks


def gather_from_context(
    tensor: Tensor, mesh: ParallelMesh | None, dim: int = SEQUENCE_DIM
) -> Tensor:
    """Returns the positions of all ranks along `dim`. The ranks' gradients are summed."""
    if mesh is None or mesh.cp_size == 1:
        return tensor
    return _GatherPositions.apply(tensor, dim, mesh.cp_group)


def exchange_heads(tensor: Tensor, mesh: ParallelMesh) -> Tensor:
    """Returns all positions of this rank's share of the heads: [B, N, S/C, D] -> [B, N/C, S, D].

    Raises:
        ValueError: The context-parallel size does not divide the heads.
    """
    return _AllToAll.apply(tensor, 1, 2, mesh.cp_group)


def restore_heads(tensor: Tensor, mesh: ParallelMesh) -> Tensor:
    """Reverses `exchange_heads`: [B, N/C, S, D] -> [B, N, S/C, D]."""
    return _AllToAll.apply(tensor, 2, 1, mesh.cp_group)


def reduce_from_context(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns the sum of the ranks' values, such as losses of their positions, on every rank."""
    if mesh is None or mesh.cp_size == 1:
        return tensor
    return _Sum.apply(tensor, mesh.cp_group)


def share_gradient(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns a value that all context ranks compute alike, such as a loss of gathered states."""
    if mesh is None or mesh.cp_size == 1:
        return tensor
    return _ShareGradient.apply(tensor, mesh.cp_size)


def start_all_to_all(
    tensor: Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup
) -> Finish:
    """Starts to send the r-th part along `split_dim` to rank r, for all r, and to join what arrives
    along `join_dim` in rank order.

    Raises:
        ValueError: The ranks do not divide the size of `split_dim`.
    """
    size = group.size()
    if tensor.shape[split_dim] % size:
        raise ValueError(
            f"{tensor.shape[split_dim]} parts cannot be exchanged between {size} ranks equally"
        )
    if records_graph():
        name = group.group_name
        result = torch.ops.shardzoo.all_to_all(tensor, split_dim, join_dim, name)
        return lambda: result
    pieces = torch.unflatten(tensor, split_dim, (size, -1)).movedim(split_dim, 0).contiguous()
    received = torch.empty_like(pieces)
    work: Any = None
    if pieces.numel():
        work = cast(Any, dist).all_to_all_single(received, pieces, group=group, async_op=True)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return received.movedim(0, join_dim).flatten(join_dim, join_dim + 1)

    return finish


# One operator of a graph that is compiled, which is done where it stands.


def _all_to_all(x: Tensor, split_dim: int, join_dim: int, group: str) -> Tensor:
    return start_all_to_all(x, split_dim, join_dim, find_group(group))().contiguous()


def _allocate_all_to_all(x: Tensor, split_dim: int, join_dim: int, group: str) -> Tensor:
    size = find_group(group).size()
    shape = list(x.shape)
    shape[split_dim] //= size
    shape[join_dim] *= size
    return x.new_empty(shape)


LIBRARY.define("all_to_all(Tensor x, int split_dim, int join_dim, str group) -> Tensor")
LIBRARY.impl("all_to_all", _all_to_all, "CompositeExplicitAutograd")
torch.library.register_fake("shardzoo::all_to_all", _allocate_all_to_all, lib=LIBRARY)


class _GatherPositions(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return start_all_gather(tensor, dim, group)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return start_reduce_scatter(grads[0], ctx.dim, ctx.group)(), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.dims = split_dim, join_dim
        ctx.group = group
        return start_all_to_all(tensor, split_dim, join_dim, group)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        split_dim, join_dim = ctx.dims
        return start_all_to_all(grads[0], join_dim, split_dim, ctx.group)(), None, None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return start_all_reduce(tensor.clone(), group)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return grads[0], None


class _ShareGradient(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return grads[0] / ctx.ranks, None
