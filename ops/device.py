"""Answers what the layers ask about a tensor's device and about compilers, each question by its
reason.

A layer that can compute something in two ways asks here which one to take, so that it names no
device itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatcher import can_bypass_dispatcher, needs_gradient


def host_can_read(tensor: Tensor) -> bool:
    """Returns whether the host reads the tensor's values from its own memory, without waiting for
    an accelerator.
    """
    return tensor.is_cpu


def writes_gradients_in_place(x: Tensor) -> bool:
    """Returns whether the gradients of views of x should be written into their places in the
    gradient of x.

    Autograd concatenates them, which is one launch on an accelerator. On a CPU it would first copy
    each of them.
    """
    return x.is_cpu and needs_gradient(x) and can_bypass_dispatcher(x)


def can_overwrite_gradients() -> bool:
    """Returns whether a backward pass may write over a tensor, or a call depend on data.

    A compiler traces neither.
    """
    return not torch.compiler.is_compiling()


def records_graph() -> bool:
    """Returns whether a compiler records the calls now, so that what it cannot trace must be one
    operator.
    """
    return torch.compiler.is_compiling()


def overlaps_communication(tensor: Tensor) -> bool:
    """Returns whether the device computes while tensors travel between ranks, as accelerators do."""
    return not tensor.is_cpu


def sums_natively(tensor: Tensor) -> bool:
    """Returns whether the process group's own reduction is faster than exchanging tensors and
    summing them here.

    NCCL's reductions can run in switches (NVLS, SHARP). Gloo's, on a CPU, round each hop's 16-bit
    partial sum and divide a tensor into many messages.
    """
    return not tensor.is_cpu
