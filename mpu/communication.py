"""Collectives on tensors, outside autograd. Each can be started early and finished after other work.

A reduce-scatter is an all-to-all of the unsummed pieces and a local sum in fp32: the volume of a ring, but the result
is rounded once however many ranks there are, where a ring or a tree rounds after every hop. So is the all-reduce of
16-bit tensors over more than two ranks, with an all-gather of the sums; others leave nothing to gain. Small tensors
of a CPU are summed whole: gloo's ring takes several times the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .divide import divide

Finish = Callable[[], Tensor]
_HALF = (torch.bfloat16, torch.float16)
_SMALL = 1 << 19  # bytes, of all ranks
# torch 2.13 renamed it and warns at the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _after(work: Any, tensor: Tensor) -> Finish:
    """`tensor`, once `work` is done."""

    def finish() -> Tensor:
        work.wait()
        return tensor

    return finish


def _start_exchange_and_sum(pieces: Tensor, group: dist.ProcessGroup) -> Finish:
    """`pieces[r]` goes to rank r; the sum of what all ranks sent here, added in fp32 or wider. pieces: [size, ...]"""
    received = torch.empty_like(pieces)
    arrived = _after(dist.all_to_all_single(received, pieces, group=group, async_op=True), received)
    wide = torch.promote_types(pieces.dtype, torch.float32)
    return lambda: arrived().sum(0, dtype=wide).to(pieces.dtype)


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Finish:
    """Sum over the group. The caller gives up `tensor`: it may be overwritten."""
    size = group.size()
    if size == 1 or tensor.numel() == 0:
        return lambda: tensor
    if tensor.is_cpu and tensor.nbytes * size <= _SMALL and tensor.is_floating_point():
        return _start_exchange_and_sum(tensor.expand(size, *tensor.shape).contiguous(), group)
    if tensor.dtype not in _HALF or size == 2:
        tensor = tensor.contiguous()
        return _after(dist.all_reduce(tensor, group=group, async_op=True), tensor)
    pieces = tensor.new_zeros(size, -(-tensor.numel() // size))
    pieces.view(-1)[: tensor.numel()].copy_(tensor.reshape(-1))
    finish_sum = _start_exchange_and_sum(pieces, group)
    return lambda: start_all_gather(finish_sum(), 0, group)()[: tensor.numel()].view(tensor.shape)


def start_all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Finish:
    """Concatenate the ranks' tensors along `dim`, in rank order."""
    size, dim = group.size(), dim % tensor.dim()
    if size == 1:
        return lambda: tensor
    gathered = tensor.new_empty(size, *tensor.shape)
    if tensor.numel() == 0:
        return lambda: gathered.movedim(0, dim).flatten(dim, dim + 1)
    arrived = _after(_all_gather(gathered.view(-1), tensor.reshape(-1), group=group, async_op=True), gathered)
    return lambda: arrived().movedim(0, dim).flatten(dim, dim + 1)


def start_reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Finish:
    """Sum over the group and keep this rank's equal share of `dim`."""
    size, dim = group.size(), dim % tensor.dim()
    if size == 1:
        return lambda: tensor
    share = divide(tensor.shape[dim], size, f"positions of dim {dim}")
    pieces = tensor.unflatten(dim, (size, share)).movedim(dim, 0).contiguous()  # [size, ..., share, ...]
    return _start_exchange_and_sum(pieces, group) if tensor.numel() else lambda: pieces[0]


def local_slice(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's equal share of `dim`, as a copy so that the whole can be freed."""
    share = divide(tensor.shape[dim], group.size(), f"positions of dim {dim % tensor.dim()}")
    return tensor.narrow(dim, group.rank() * share, share).clone(memory_format=torch.contiguous_format)
