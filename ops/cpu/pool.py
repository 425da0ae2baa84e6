"""Gives large results the memory of freed results (csrc/matmul/pool.h).

New memory from the system causes page faults when it is first written, which can take longer than
the computation itself: attention scores are large compared with their arithmetic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..dispatcher import KINDS, Kind, can_bypass_dispatcher
from ..library import call_compiled, load_error

# Results of this size or more use memory of the pool.
MIN_POOLED_BYTES = 1 << 20


def empty_pooled(like: Tensor, *size: int) -> Tensor:
    """Returns a contiguous, uninitialized tensor of `size` (that of `like` by default) like `like`.

    A large CPU tensor reuses the memory of a freed tensor, if the compiled kernels are available.
    """
    if like.is_cpu and KINDS[type(like)] is Kind.PLAIN_TENSOR:
        elements = math.prod(size) if size else like.numel()
        if elements * like.itemsize >= MIN_POOLED_BYTES and load_error() is None:
            return recycled(like, size or like.shape)
    if size:
        return like.new_empty(size)
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def recycled(like: Tensor, size: tuple[int, ...]) -> Tensor:
    """Returns an uninitialized CPU tensor; a large one has the memory of a freed tensor."""
    return call_compiled("recycled", like, size)


def fits_pool(elements: int, first: Tensor, *others: Tensor | None) -> bool:
    """Returns whether a result of `elements` elements, computed from these tensors, should use
    memory of the pool.
    """
    return elements * first.itemsize >= MIN_POOLED_BYTES and is_plain_call(first, *others)


def is_plain_call(first: Tensor, *others: Tensor | None) -> bool:
    """Returns whether a call has real, dense CPU tensors of one floating-point dtype, and nothing
    intercepts it.

    Tracers, transforms, autocast and forward-mode differentiation intercept calls.
    """
    return (
        first.is_cpu
        and first.is_floating_point()
        and all(other is None or other.dtype == first.dtype for other in others)
        and all(tensor is None or tensor.layout is torch.strided for tensor in (first, *others))
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and can_bypass_dispatcher(first, *others)
    )
