"""Computes matrix products and linear layers.

An accelerator uses PyTorch's own products. On a CPU, `cpu/products.py` computes large ones and
`cpu/few_rows.py` those of a decoding step. The reference of each function is the PyTorch function
in its docstring.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .cpu import few_rows, products
from .dispatcher import in_inference_mode


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b` of a [..., M, K] and b [..., K, N], with equal leading dimensions.

    A large product on a CPU can be differentiated only once.
    """
    if not a.is_cpu:
        return a @ b
    return products.matmul(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `F.linear(x, weight, bias)`, [..., F] in the dtype of x, of x [..., C], weight [F, C]
    and bias [F].

    A large product on a CPU can be differentiated only once.
    """
    if not x.is_cpu:
        return F.linear(x, weight, bias)
    if in_inference_mode():
        y = few_rows.linear(x, weight, bias)
        if y is not None:
            return y
    return products.linear(x, weight, bias)


def addmm(bias: Tensor | None, x: Tensor, weight_t: Tensor) -> Tensor:
    """Returns `bias + x @ weight_t` outside autograd, of bias [F] or None, x [..., C] and weight_t
    [C, F].

    Unlike `linear`, it never uses the kernel for few rows, so the bits do not depend on inference
    mode.
    """
    if not x.is_cpu:
        return F.linear(x, weight_t.t(), bias)
    return products.compute_linear(x, weight_t.t(), bias)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `total + a @ b` in `dtype`, outside autograd; it may overwrite `total`.

    A GPU multiplies 16-bit factors and adds to an fp32 sum in one product. Other devices widen the
    factors.

    Args:
        total: [M, N] in `dtype`; None for zeros.
        a: [M, K].
        b: [K, N].
    """
    widens = a.dtype != dtype and not a.is_cuda
    if widens:
        a = a.to(dtype)
        b = b.to(dtype)
    if total is None:
        return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)
    if a.dtype == dtype:
        return total.addmm_(a, b)
    return torch.ops.aten.addmm.dtype_out(total, a, b, dtype, out=total)


def autocast_arguments(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts the arguments of a linear layer like `torch.autocast`, which does not do this for a
    custom function.
    """
    first = tensors[0]
    assert first is not None
    device = first.device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)
