"""The memory that torch gives out, and what autograd keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch


def kept_bytes(forward: Callable[[], Any], own: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the distinct storages that autograd keeps for backward in `forward()`, those of `own` aside."""
    aside = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in aside:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


def peak_of(work: Any) -> int:
    """Bytes that torch's profiler sees the allocator give out, at most, on top of what is there before.

    The pool of large CPU outputs, which the profiler does not see, has no part in it, nor has the kernel for products,
    whose results are from there.
    """
    import sys
    from unittest import mock

    from torch.profiler import ProfilerActivity, profile

    without_pool = mock.patch(
        "shardzoo.ops.cpu.pool.recycled", lambda like, size: like.new_empty(size)
    )
    without_kernel = mock.patch.object(
        sys.modules["shardzoo.ops.cpu.products"], "_kernel_dtypes", tuple
    )
    with (
        without_pool,
        without_kernel,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        work()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    return max(
        accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    )
