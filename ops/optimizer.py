"""Computes an AdamW update and sums of squares, each in one pass over memory, where our CPU kernels
run.

The reference is PyTorch's own: `torch.optim.AdamW` and `torch._foreach_norm`. The kernel of AdamW
also scales the gradient and rounds the new fp32 parameter to a 16-bit copy. Both sum in an order
that depends only on the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from .dispatcher import can_bypass_dispatcher
from .library import call_compiled
from .registration import same_dtype
from .variants import choose_variant


def adamw(
    parameter: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    rounded: Tensor | None,
    *,
    gradient_scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
) -> None:
    """Updates a parameter and its states in place (Loshchilov and Hutter 2019, arXiv:1711.05101).

    Args:
        parameter: Any shape, fp32, bf16, fp16 or fp64; all tensors suit `suits_optimizer_kernels`.
        gradient: Multiplied by `gradient_scale`; it is not changed.
        states: The averages of the gradient and of its square.
        rounded: bf16 or fp16, gets the new parameter; None for no copy.
        step: The number of this update, from 1.
    """
    numbers = (gradient_scale, lr, beta1, beta2, eps, weight_decay, step)
    call_compiled("adamw", parameter, gradient, *states, rounded, *map(float, numbers))


def sum_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of the squares of all elements of at least one tensor, fp32 [] on `device`."""
    if all(suits_optimizer_kernels(tensor) for tensor in tensors):
        total = sum(call_compiled("square_sum", tensor) for tensor in tensors)
        return torch.tensor(total, dtype=torch.float32)
    wide = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    norms = torch.ops.aten._foreach_norm(list(tensors), 2, dtype=wide)
    return torch.stack([norm.to(device) for norm in norms]).square().sum().float()


def may_have_adamw_kernel(tensor: Tensor) -> bool:
    """Returns whether `adamw` exists for the tensor's device."""
    return tensor.is_cpu


def suits_optimizer_kernels(*tensors: Tensor) -> bool:
    """Returns whether the kernels take these tensors: dense, of one dtype, on a CPU."""
    is_dense = all(
        tensor.is_cpu and tensor.is_contiguous() and tensor.numel() for tensor in tensors
    )
    return (
        is_dense
        and same_dtype(*tensors) is None
        and can_bypass_dispatcher(*tensors)
        and choose_variant("cpu") == "cpp"
    )
