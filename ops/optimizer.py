"""Computes an AdamW update and sums of squares, each in one pass over memory, where our kernels run.

The reference is PyTorch's own: `torch.optim.AdamW` and `torch._foreach_norm`. The kernels of AdamW
also scale the gradient and round the new fp32 parameter to a 16-bit copy. On a CPU a call updates a
tensor; on a GPU a launch updates any number of them, reads the gradient in 16 bits too, and takes the
factor that clips, `found_inf` and the number of steps where they are, so that the host does not wait.
The sums of squares are in an order that depends only on the sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .device import make_current
from .dispatcher import KINDS, Kind, can_bypass_dispatcher
from .library import call_compiled
from .registration import same_dtype
from .variants import choose_variant, current_choice, triton_unavailable

if TYPE_CHECKING:
    from .triton_kernels.optimizer import LaunchTable


# What `adamw_together` takes as a gradient, and as a rounded copy.
GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class AdamWTensors(NamedTuple):
    """What AdamW reads and writes of a parameter. All but `step` have its shape.

    Attributes:
        parameter, average, square_average: fp32.
        gradient: fp32, bf16 or fp16.
        step: The number of this update, from 1, fp32 [].
        rounded: bf16 or fp16, gets the new parameter; None for no copy.
    """

    parameter: Tensor
    gradient: Tensor
    average: Tensor
    square_average: Tensor
    step: Tensor
    rounded: Tensor | None


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
    norms = torch.ops.aten._foreach_norm.Scalar(list(tensors), 2, dtype=wide)
    return torch.stack([norm.to(device) for norm in norms]).square().sum().float()


def adamw_together(
    tensors: Sequence[AdamWTensors],
    tables: dict[tuple[object, ...], LaunchTable],
    *,
    factor: Tensor | None,
    found_inf: Tensor | None,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Updates tensors in place on an accelerator, one launch for each combination of dtypes.

    Args:
        tensors: Those of parameters with the same settings; all suit `suits_adamw_together`.
        tables: Keeps between the steps of an optimizer what a launch needs on the device. The keys are
            the dtypes and the settings' names; the caller passes an empty one at first.
        factor: fp32 [], multiplies the gradients; None for 1.
        found_inf: fp32 []; where it is not 0, nothing changes. None for 0.
        lr: A number, or fp32 [] on the device, which a CUDA graph reads anew.
    """
    from .triton_kernels.optimizer import LaunchTable, launch_adamw

    by_dtypes: defaultdict[tuple[object, ...], list[AdamWTensors]] = defaultdict(list)
    for each in tensors:
        rounded = None if each.rounded is None else each.rounded.dtype
        by_dtypes[each.gradient.dtype, rounded].append(each)
    for dtypes, alike in by_dtypes.items():
        table = tables.setdefault(dtypes, LaunchTable())
        with make_current(alike[0].parameter.device):
            launch_adamw(alike, table, found_inf, factor, lr, betas, eps, weight_decay)


def has_adamw_together(device: torch.device) -> bool:
    """Returns whether `adamw_together` exists for a device under the current choice of kernels."""
    if device.type == "cpu":
        return choose_variant("cpu") == "triton"
    is_chosen = current_choice() in ("auto", "triton")
    return is_chosen and device.type == "cuda" and triton_unavailable("cuda") is None


def suits_adamw_together(tensors: AdamWTensors) -> bool:
    """Returns whether `adamw_together` takes these tensors: dense, on one device, fp32 but for the
    gradient and the rounded copy.
    """
    parameter, gradient, average, square_average, step, rounded = tensors
    device = parameter.device
    for each in (parameter, average, square_average, step):
        if each.dtype != torch.float32 or not _is_dense(each, device):
            return False
    if gradient.dtype not in GRADIENT_DTYPES or not _is_dense(gradient, device):
        return False
    if rounded is None:
        return True
    return rounded.dtype in GRADIENT_DTYPES and _is_dense(rounded, device)


def _is_dense(tensor: Tensor, device: torch.device) -> bool:
    """Returns whether a tensor is on this device, in row-major order, and of a plain class."""
    is_plain = KINDS[type(tensor)] is not Kind.INTERCEPTING_TENSOR
    return is_plain and tensor.is_contiguous() and tensor.device == device


def may_have_adamw_kernel(tensor: Tensor) -> bool:
    """Returns whether `adamw` may exist for the tensor's device."""
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
