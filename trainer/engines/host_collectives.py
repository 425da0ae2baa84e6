"""Exchanges the parameters and gradients of `fully_shard` between processes on CPUs, in place.

Ranks on one host exchange them through shared memory (`mpu.shared_memory`). Elsewhere gloo does. It
gathers and reduces into buffers of its own, each as large as what is exchanged, and FSDP2 keeps the
buffer of a block's gradients until those of the next block have been computed, because on a GPU they
may still be on their way. Together these are two blocks more than a rank needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import SymInt, Tensor
from torch.distributed.fsdp import FSDPModule

from ...mpu import shared_memory


class HostAllGather:
    """Gathers parts of equal sizes into the buffer that is their place: through shared memory, or by
    one broadcast each.
    """

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
        if channel := shared_memory.find(output_tensor, group):
            kind = shared_memory.ALL_GATHER
            finish = shared_memory.start(
                channel, kind, input_tensor, output_tensor, input_tensor.numel()
            )
            finish()
            return None
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
        channel = shared_memory.find(input_tensor, group)
        if channel and op == dist.ReduceOp.SUM:
            kind = shared_memory.REDUCE_SCATTER
            finish = shared_memory.start(
                channel, kind, input_tensor, output_tensor, output_tensor.numel()
            )
            finish()
        else:
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
