"""Exchanges the parameters and gradients of `fully_shard` between processes on CPUs, in place.

Gloo gathers and reduces into buffers of its own, each as large as what is exchanged, and FSDP2 keeps
the buffer of a block's gradients until those of the next block have been computed, because on a GPU
they may still be on their way. Together these are two blocks more than a rank needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import SymInt, Tensor
from torch.distributed.fsdp import FSDPModule


class HostAllGather:
    """Gathers parts of equal sizes by one broadcast each, into the buffer that is their place."""

    def allocate(
        self, size: Sequence[int | SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # `fully_shard` has put this rank's part in its place in the output.
        parts = output_tensor.chunk(dist.get_world_size(group))
        work = None
        for rank, part in enumerate(parts):
            work = dist.broadcast(part, group=group, group_src=rank, async_op=async_op)
        # A process's collectives in a group end in the order in which they were begun.
        return work


class HostReduceScatter:
    """Adds up gradients in the buffer that holds this rank's, and frees it."""

    def allocate(
        self, size: Sequence[int | SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        # Gloo's reduce-scatter is an all-reduce of a copy, too.
        dist.all_reduce(input_tensor, op=op, group=group)
        own = input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        output_tensor.copy_(own)
        input_tensor.untyped_storage().resize_(0)
        return None


def use_host_collectives(module: FSDPModule) -> None:
    """Lets a module that `fully_shard` has split exchange in place."""
    # torch does not export the classes that describe these two.
    exchanging: Any = module
    exchanging.set_custom_all_gather(HostAllGather())
    exchanging.set_custom_reduce_scatter(HostReduceScatter())
