"""Provides the tensor-parallel collectives, with and without autograd.

These functions are differentiable. Without a mesh, or with one rank, each returns its input:

| function                  | forward             | backward                                       |
|---------------------------|---------------------|------------------------------------------------|
| `copy_to_tp`              | identity            | all-reduce                                     |
| `reduce_from_tp`          | all-reduce          | identity                                       |
| `gather_from_tp`          | all-gather          | reduce-scatter (`partial_grad`) or local slice |
| `scatter_to_tp`           | local slice         | all-gather                                     |
| `gather_sequence`         | all-gather (dim 1)  | reduce-scatter (`partial_grad`) or local slice |
| `scatter_sequence`        | local slice (dim 1) | all-gather                                     |
| `reduce_scatter_sequence` | reduce-scatter      | all-gather                                     |
| `gather_from_dp`          | all-gather (dim 0)  | reduce-scatter                                 |
| `exchange_rows`           | all-to-all          | all-to-all, the other way                      |

Each keeps the dtype, accepts non-contiguous tensors, and leaves its input and its incoming gradient
unchanged.

They are built from the `start_*` functions below, which autograd does not record. A `start_*`
function starts a collective and returns a function that waits for its result, so that other work
can run in between.

CPU tensors of ranks on one host go through shared memory (`shared_memory.py`); sums are added in
rank order in fp32 or wider and rounded once. Other tensors go through torch.distributed. There
`set_reduction` chooses who adds:

- "native", the default on GPUs: the backend's own all-reduce and reduce-scatter. A ring or a tree
  rounds 16-bit sums after every hop.
- "fp32", the default on CPUs: a reduce-scatter is an all-to-all of the unsummed pieces followed by
  a local sum in fp32. It sends as much data as a ring, but rounds the result once for any number of
  ranks. The all-reduce of 16-bit tensors over more than two ranks works the same way and then
  gathers the sums. In the other cases the library's all-reduce is as exact. Small CPU tensors are
  exchanged whole and summed locally, because gloo's ring sends several times as many messages.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.autograd import Function
from ..ops.device import records_graph, sums_natively
from ..ops.registration import LIBRARY
from . import shared_memory
from .division import divide
from .mesh import REPLICA_AXES, SAMPLE_AXES, ParallelMesh

SEQUENCE_DIM = 1
Finish = Callable[[], Tensor]
_HALF = (torch.bfloat16, torch.float16)
_SMALL = 1 << 19  # bytes, summed over the ranks
# torch 2.13 renamed these functions and warns about the old names.
if hasattr(dist, "all_gather_single"):
    _all_gather = cast(Any, dist).all_gather_single
    _reduce_scatter = cast(Any, dist).reduce_scatter_single
else:
    _all_gather = cast(Any, dist).all_gather_into_tensor
    _reduce_scatter = cast(Any, dist).reduce_scatter_tensor

Reduction = Literal["auto", "native", "fp32"]
_reductions: WeakKeyDictionary[dist.ProcessGroup, Reduction] = WeakKeyDictionary()


def set_reduction(group: dist.ProcessGroup, reduction: Reduction) -> None:
    """Chooses who adds this group's tensors where they do not go through shared memory (see the top
    of this file).

    Every rank of the group must choose the same. "auto" is "native" for tensors on a GPU, else
    "fp32".
    """
    _reductions[group] = reduction


def _adds_natively(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    reduction = _reductions.get(group, "auto")
    return reduction == "native" or (reduction == "auto" and sums_natively(tensor))


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return start_all_reduce(_fresh(grads[0]), ctx.group)(), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return start_all_reduce(_fresh(tensor), group)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return grads[0], None


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup, partial_grad: bool
    ) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        ctx.partial_grad = partial_grad
        return start_all_gather(tensor, dim, group)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        if ctx.partial_grad:
            return start_reduce_scatter(grads[0], ctx.dim, ctx.group)(), None, None, None
        return local_slice(grads[0], ctx.dim, ctx.group), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup, partial: bool
    ) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        if partial:
            return start_reduce_scatter(tensor, dim, group)()
        return local_slice(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return start_all_gather(grads[0], ctx.dim, ctx.group)(), None, None, None


def copy_to_tp(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns a replicated tensor for use in a tensor-parallel region. Its gradient is the sum over
    the ranks.

    This also suits a replicated parameter that each rank applies to its own part of the sequence.
    """
    if mesh is None or mesh.tp_size == 1:
        return tensor
    return _Copy.apply(tensor, mesh.tp_group)


def reduce_from_tp(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns the sum of the ranks' partial results on every rank, to leave a tensor-parallel
    region.
    """
    if mesh is None or mesh.tp_size == 1:
        return tensor
    return _Reduce.apply(tensor, mesh.tp_group)


def gather_from_tp(
    tensor: Tensor, mesh: ParallelMesh | None, dim: int = -1, *, partial_grad: bool = False
) -> Tensor:
    """Returns the ranks' tensors concatenated along `dim`.

    Args:
        partial_grad: True when the ranks then compute differently: their gradients are summed.
            False when every rank runs the same computation.
    """
    if mesh is None or mesh.tp_size == 1:
        return tensor
    return _Gather.apply(tensor, dim, mesh.tp_group, partial_grad)


def scatter_to_tp(tensor: Tensor, mesh: ParallelMesh | None, dim: int = -1) -> Tensor:
    """Returns this rank's slice of a replicated tensor along `dim`.

    Raises ValueError if the size is not divisible.
    """
    if mesh is None or mesh.tp_size == 1:
        return tensor
    return _Scatter.apply(tensor, dim, mesh.tp_group, False)


def gather_sequence(
    tensor: Tensor, mesh: ParallelMesh | None, *, partial_grad: bool = True
) -> Tensor:
    """Gathers the sequence dimension: [B, S/tp, ...] -> [B, S, ...].

    Args:
        partial_grad: True when tensor-parallel layers follow: each rank then has a partial
            gradient, and the partial gradients are summed. False when every rank then runs the same
            computation.
    """
    if mesh is None or mesh.tp_size == 1:
        return tensor
    return _Gather.apply(tensor, SEQUENCE_DIM, mesh.tp_group, partial_grad)


def scatter_sequence(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns this rank's slice [B, S/tp, ...] of a replicated [B, S, ...].

    Raises ValueError if S is not divisible.
    """
    return scatter_to_tp(tensor, mesh, SEQUENCE_DIM)


def reduce_scatter_sequence(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Sums the ranks' partial results [B, S, ...] and returns this rank's slice [B, S/tp, ...] of
    the sum.

    Raises ValueError if tp does not divide S.
    """
    if mesh is None or mesh.tp_size == 1:
        return tensor
    return _Scatter.apply(tensor, SEQUENCE_DIM, mesh.tp_group, True)


def gather_from_dp(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns the rows [B, ...] of all data-parallel ranks, in rank order: [dp B, ...].

    The gradient of a row is the sum of the gradients that all ranks have for it, so that a loss
    may compare the rows of one rank with those of the others.
    """
    if mesh is None or mesh.size(*SAMPLE_AXES) == 1:
        return tensor
    return _Gather.apply(tensor, 0, mesh.group(*SAMPLE_AXES), True)


def sum_over_replicas(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns the sum of a tensor over the ranks that hold the same parameters, experts excepted.

    It has no gradient.
    """
    if mesh is None or mesh.size(*REPLICA_AXES) == 1:
        return tensor
    return start_all_reduce(tensor.clone(), mesh.group(*REPLICA_AXES))()


class _ExchangeRows(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
        longest: int | None,
    ) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        ctx.longest = longest
        return all_to_all_rows(rows, sent, received, group, longest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        grad = all_to_all_rows(grads[0], ctx.received, ctx.sent, ctx.group, ctx.longest)
        return grad, None, None, None, None


def exchange_rows(
    rows: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    longest: int | None = None,
) -> Tensor:
    """Sends each rank of a group its rows, and returns those that the ranks have sent to this one,
    [sum(received), ...], in rank order.

    Args:
        rows: [sum(sent), ...]: first those for rank 0, then those for rank 1, and so on.
        sent, received: The number of rows for and from each rank.
        longest: The most rows that any rank sends to another, if all ranks know it: CPU tensors
            then go through shared memory.
    """
    return _ExchangeRows.apply(rows, sent, received, group, longest)


# Collectives that autograd does not record.


def all_to_all_rows(
    rows: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    longest: int | None = None,
) -> Tensor:
    """Does what `exchange_rows` does."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    if longest is not None and (channel := shared_memory.find(rows, group)):
        return shared_memory.exchange(channel, rows.contiguous(), out, sent, received, longest)
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def _finish_after(work: Any, tensor: Tensor) -> Finish:
    """Returns a function that waits for `work` and then returns `tensor`."""

    def finish() -> Tensor:
        work.wait()
        return tensor

    return finish


def _start_exchange_and_sum(pieces: Tensor, group: dist.ProcessGroup) -> Finish:
    """Sends `pieces[r]` to rank r, and sums the pieces that this rank receives in fp32 or wider.
    pieces: [size, ...]
    """
    if channel := shared_memory.find(pieces, group):
        out = torch.empty_like(pieces[0])
        return shared_memory.start(channel, shared_memory.REDUCE_SCATTER, pieces, out, out.numel())
    received = torch.empty_like(pieces)
    arrived = _finish_after(
        dist.all_to_all_single(received, pieces, group=group, async_op=True), received
    )
    wide = torch.promote_types(pieces.dtype, torch.float32)
    return lambda: arrived().sum(0, dtype=wide).to(pieces.dtype)


def _compiled(kind: str, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Finish:
    """Makes a collective one operator of a graph that is compiled, which is done where it stands."""
    result = torch.ops.shardzoo.collective(tensor, kind, dim, group.group_name)
    return lambda: result


def find_group(name: str) -> dist.ProcessGroup:
    """Returns the process group of a name, by which operators of compiled graphs know it."""
    return cast(Any, dist).distributed_c10d._resolve_process_group(name)


def _collective(x: Tensor, kind: str, dim: int, group: str) -> Tensor:
    ranks = find_group(group)
    if kind == "all_reduce":
        return start_all_reduce(_fresh(x), ranks)().contiguous()
    start = start_all_gather if kind == "all_gather" else start_reduce_scatter
    return start(x, dim, ranks)().contiguous()


def _allocate(x: Tensor, kind: str, dim: int, group: str) -> Tensor:
    shape = list(x.shape)
    size = find_group(group).size()
    if kind == "all_gather":
        shape[dim] *= size
    if kind == "reduce_scatter":
        shape[dim] = equal_share(x, dim % x.dim(), size)
    return x.new_empty(shape)


LIBRARY.define("collective(Tensor x, str kind, int dim, str group) -> Tensor")
LIBRARY.impl("collective", _collective, "CompositeExplicitAutograd")
torch.library.register_fake("shardzoo::collective", _allocate, lib=LIBRARY)


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Finish:
    """Starts a sum over the group.

    It may overwrite `tensor`, so the caller must not use `tensor` again.
    """
    if records_graph():
        return _compiled("all_reduce", tensor, 0, group)
    size = group.size()
    if size == 1 or tensor.numel() == 0:
        return lambda: tensor
    if channel := shared_memory.find(tensor, group):
        tensor = tensor.contiguous()
        return shared_memory.start(
            channel, shared_memory.ALL_REDUCE, tensor, tensor, tensor.numel()
        )
    native = _adds_natively(tensor, group)
    if (
        not native
        and not sums_natively(tensor)
        and tensor.nbytes * size <= _SMALL
        and tensor.is_floating_point()
    ):
        return _start_exchange_and_sum(tensor.expand(size, *tensor.shape).contiguous(), group)
    if native or tensor.dtype not in _HALF or size == 2:
        tensor = tensor.contiguous()
        return _finish_after(dist.all_reduce(tensor, group=group, async_op=True), tensor)
    pieces = tensor.new_zeros(size, -(-tensor.numel() // size))
    pieces.view(-1)[: tensor.numel()].copy_(tensor.reshape(-1))
    finish_sum = _start_exchange_and_sum(pieces, group)
    return lambda: start_all_gather(finish_sum(), 0, group)()[: tensor.numel()].view(tensor.shape)


def start_all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Finish:
    """Starts a concatenation of the ranks' tensors along `dim`, in rank order."""
    if records_graph():
        return _compiled("all_gather", tensor, dim, group)
    size = group.size()
    dim = dim % tensor.dim()
    if size == 1:
        return lambda: tensor
    gathered = tensor.new_empty(size, *tensor.shape)
    if tensor.numel() == 0:
        return lambda: gathered.movedim(0, dim).flatten(dim, dim + 1)
    if channel := shared_memory.find(tensor, group):
        arrived = shared_memory.start(
            channel, shared_memory.ALL_GATHER, tensor.contiguous(), gathered, tensor.numel()
        )
    else:
        arrived = _finish_after(
            _all_gather(gathered.view(-1), tensor.reshape(-1), group=group, async_op=True), gathered
        )
    return lambda: arrived().movedim(0, dim).flatten(dim, dim + 1)


def start_reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Finish:
    """Starts a sum over the group, of which this rank keeps its equal slice of `dim`."""
    if records_graph():
        return _compiled("reduce_scatter", tensor, dim, group)
    size = group.size()
    dim = dim % tensor.dim()
    if size == 1:
        return lambda: tensor
    share = equal_share(tensor, dim, size)
    pieces = (
        torch.unflatten(tensor, dim, (size, share)).movedim(dim, 0).contiguous()
    )  # [size, ..., share, ...]
    if not tensor.numel():
        return lambda: pieces[0]
    if _adds_natively(tensor, group) and not shared_memory.find(tensor, group):
        summed = torch.empty_like(pieces[0])
        return _finish_after(
            _reduce_scatter(summed.view(-1), pieces.view(-1), group=group, async_op=True), summed
        )
    return _start_exchange_and_sum(pieces, group)


def local_slice(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's equal slice of `dim`, as a copy, so that the whole tensor can be freed."""
    share = equal_share(tensor, dim % tensor.dim(), group.size())
    return tensor.narrow(dim, group.rank() * share, share).clone(
        memory_format=torch.contiguous_format
    )


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Returns the bytes of every rank of the group, by default of all ranks, in rank order.

    Unlike `torch.distributed.all_gather_object` it does not pickle, so nothing that arrives can be
    executed.
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    own = torch.tensor(bytearray(data), dtype=torch.uint8, device=device)
    sizes = [
        torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    texts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(texts, torch.nn.functional.pad(own, (0, longest - len(own))), group=group)
    found = [
        cast(list[int], text[: int(size)].tolist()) for text, size in zip(texts, sizes, strict=True)
    ]
    return [bytes(numbers) for numbers in found]


def gather_rows(parameter: Any) -> Tensor:
    """Returns a parameter's value: of one of which the data-parallel ranks have rows each (FSDP),
    all rows, in the type of the model's files. Collective over those ranks then.
    """
    sharded = getattr(parameter, "sharded", None)
    if sharded is None:
        return parameter.detach()
    return parameter.detach().full_tensor().to(sharded.stored_dtype)


def equal_share(tensor: Tensor, dim: int, size: int) -> int:
    """Returns the length of a rank's slice of `dim`.

    Raises ValueError if the ranks cannot have equal slices.
    """
    length = tensor.shape[dim]
    if dim == SEQUENCE_DIM and tensor.dim() > 2 and length % size:
        raise ValueError(
            f"sequence parallelism cannot split sequences of {length} positions over {size} tensor-parallel ranks; pad "
            f"them to a multiple of {size}, such as {-(-length // size) * size}, or use sequence_parallel=False"
        )
    return divide(length, size, f"positions of dim {dim}")
