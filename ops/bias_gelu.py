"""GELU of x + bias, exact (erf) or by the tanh approximation (Hendrycks and Gimpel 2016).

Calculated in fp32 (fp64 for fp64 input), the addition included, and rounded once.
"""

from __future__ import annotations

import math

import torch

from .dispatch import same_dtype
from .library import Op, compute_dtype, empty_pooled, nothing

APPROXIMATIONS = ("none", "tanh")


def gelu(z: torch.Tensor, tanh: bool) -> torch.Tensor:
    """The naive definition."""
    if tanh:
        return 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)))
    return 0.5 * z * (1.0 + torch.erf(z / math.sqrt(2.0)))


def gelu_derivative(z: torch.Tensor, tanh: bool) -> torch.Tensor:
    """d gelu / dz."""
    if tanh:
        t = torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3))
        inner = math.sqrt(2.0 / math.pi) * (1.0 + 3 * 0.044715 * z * z)
        # t * t is exactly 1 wherever z * z overflows, and 0 * inf must not make a NaN of that
        return 0.5 * (1.0 + t) + torch.where(t.abs() == 1.0, 0.0, 0.5 * z * (1.0 - t * t) * inner)
    density = torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0))) + torch.where(density == 0.0, 0.0, z * density)


def _preactivation(x, bias):
    z = x.to(compute_dtype(x))
    return z if bias is None else z + bias.to(z.dtype)


def reference(x, bias, tanh):
    """gelu(x + bias)."""
    return (gelu(_preactivation(x, bias), tanh).to(x.dtype),)


def backward_reference(grad, x, bias, tanh):
    """Gradients of x and of the bias."""
    z = _preactivation(x, bias)
    grad_z = grad.to(z.dtype) * gelu_derivative(z, tanh)
    grad_bias = nothing(x) if bias is None else grad_z.flatten(0, -2).sum(0).to(bias.dtype)
    return grad_z.to(x.dtype), grad_bias


def _contiguous(*tensors):
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


forward_op = Op(
    "bias_gelu",
    "Tensor x, Tensor? bias, bool tanh",
    ("y",),
    allocate=lambda x, bias, tanh: (empty_pooled(x),),
    reference=reference,
    prepare=lambda x, bias, tanh: same_dtype(x, bias) or (*_contiguous(x, bias), tanh),
)
backward_op = Op(
    "bias_gelu_backward",
    "Tensor grad, Tensor x, Tensor? bias, bool tanh",
    ("grad_x", "grad_bias"),
    allocate=lambda grad, x, bias, tanh: (
        empty_pooled(x),
        nothing(x) if bias is None else torch.empty_like(bias),
    ),
    reference=backward_reference,
    prepare=lambda grad, x, bias, tanh: same_dtype(grad, x, bias) or (*_contiguous(grad, x, bias), tanh),
)


def _setup_context(ctx, inputs, output):
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx, grad):
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = backward_op(grad, x, bias, ctx.tanh)
    return grad_x, None if bias is None else grad_bias, None


forward_op.autograd(_setup_context, _backward)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "none") -> torch.Tensor:
    """gelu(x + bias): x [..., F], bias [F]; `approximate` is "none" (erf) or "tanh". Returns x's shape and
    dtype.

    Raises ValueError for another approximation or a bias of another size.
    """
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"GELU has approximate = {' or '.join(map(repr, APPROXIMATIONS))}, got {approximate!r}")
    if bias is not None and tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(f"the bias of x {tuple(x.shape)} has shape ({x.shape[-1]},), got {tuple(bias.shape)}")
    return forward_op(x, bias, approximate == "tanh")
