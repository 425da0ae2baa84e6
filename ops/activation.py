"""Computes activations: GELU of x + bias, gated linear units act(gate) * up, and ReLU.

GELU is exact (erf) or the tanh approximation (Hendrycks and Gimpel 2016). A gated linear unit
(Shazeer 2020) uses GELU or SiLU. Both are computed in fp32 (fp64 for fp64 input), including the
bias addition, and rounded once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .cpu.pool import empty_pooled, fits_pool
from .dispatcher import needs_gradient
from .registration import Op, compute_dtype, contiguous, empty_placeholder, same_dtype

APPROXIMATIONS = ("none", "tanh")


def gelu(z: Tensor, tanh: bool) -> Tensor:
    """Returns GELU by its definition."""
    if tanh:
        return 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)))
    return 0.5 * z * (1.0 + torch.erf(z / math.sqrt(2.0)))


def gelu_derivative(z: Tensor, tanh: bool) -> Tensor:
    """Returns the derivative of GELU at z."""
    if tanh:
        t = torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3))
        inner = math.sqrt(2.0 / math.pi) * (1.0 + 3 * 0.044715 * z * z)
        # t * t is exactly 1 where z * z overflows; without the `where`, 0 * inf would be NaN.
        return 0.5 * (1.0 + t) + torch.where(t.abs() == 1.0, 0.0, 0.5 * z * (1.0 - t * t) * inner)
    density = torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0))) + torch.where(
        density == 0.0, 0.0, z * density
    )


def _preactivation(x, bias):
    z = x.to(compute_dtype(x))
    return z if bias is None else z + bias.to(z.dtype)


def bias_gelu_reference(x, bias, tanh):
    """Computes the definition, gelu(x + bias)."""
    return (gelu(_preactivation(x, bias), tanh).to(x.dtype),)


def bias_gelu_backward_reference(grad, x, bias, tanh):
    """Returns the gradients of x and of the bias."""
    z = _preactivation(x, bias)
    grad_z = grad.to(z.dtype) * gelu_derivative(z, tanh)
    grad_bias = (
        empty_placeholder(x) if bias is None else grad_z.flatten(0, -2).sum(0).to(bias.dtype)
    )
    return grad_z.to(x.dtype), grad_bias


def _launch_triton_bias_gelu(*arguments):
    from .triton_kernels.activation import launch_bias_gelu

    launch_bias_gelu(*arguments)


bias_gelu_op = Op(
    "bias_gelu",
    "Tensor x, Tensor? bias, bool tanh",
    ("y",),
    allocate=lambda x, bias, tanh: (empty_pooled(x),),
    reference=bias_gelu_reference,
    prepare=lambda x, bias, tanh: same_dtype(x, bias) or (*contiguous(x, bias), tanh),
    triton=_launch_triton_bias_gelu,
)


def _launch_triton_bias_gelu_backward(*arguments):
    from .triton_kernels.activation import launch_bias_gelu_backward

    launch_bias_gelu_backward(*arguments)


bias_gelu_backward_op = Op(
    "bias_gelu_backward",
    "Tensor grad, Tensor x, Tensor? bias, bool tanh",
    ("grad_x", "grad_bias"),
    allocate=lambda grad, x, bias, tanh: (
        empty_pooled(x),
        empty_placeholder(x) if bias is None else torch.empty_like(bias),
    ),
    reference=bias_gelu_backward_reference,
    prepare=lambda grad, x, bias, tanh: (
        same_dtype(grad, x, bias) or (*contiguous(grad, x, bias), tanh)
    ),
    triton=_launch_triton_bias_gelu_backward,
)


def _bias_gelu_setup_context(ctx, inputs, output):
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _bias_gelu_backward(ctx, grad):
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = bias_gelu_backward_op(grad, x, bias, ctx.tanh)
    return grad_x, None if bias is None else grad_bias, None


bias_gelu_op.autograd(_bias_gelu_setup_context, _bias_gelu_backward)


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Returns gelu(x + bias) in the shape and dtype of x.

    Args:
        x: [..., F].
        bias: [F] or None.
        approximate: "none" (erf) or "tanh".

    Raises:
        ValueError: `approximate` has another value, or the bias has another size.
    """
    if approximate not in APPROXIMATIONS:
        raise ValueError(
            f"approximate must be {' or '.join(map(repr, APPROXIMATIONS))}, got {approximate!r}"
        )
    if bias is not None and tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(
            f"the bias of x {tuple(x.shape)} has shape ({x.shape[-1]},), got {tuple(bias.shape)}"
        )
    return bias_gelu_op(x, bias, approximate == "tanh")


GELU, GELU_TANH, SILU = range(3)  # the values of `activation` in the schema


def _activate(z, activation):
    return z * torch.sigmoid(z) if activation == SILU else gelu(z, activation == GELU_TANH)


def _derivative(z, activation):
    if activation != SILU:
        return gelu_derivative(z, activation == GELU_TANH)
    s = torch.sigmoid(z)
    # s * (1 - s) is 0 at +-inf; without the `where`, z * 0 would be NaN there.
    return s + torch.where((s == 0.0) | (s == 1.0), 0.0, z * s * (1.0 - s))


def glu_reference(gate, up, activation):
    """Computes the definition, act(gate) * up."""
    dtype = compute_dtype(gate)
    return ((_activate(gate.to(dtype), activation) * up.to(dtype)).to(gate.dtype),)


def glu_backward_reference(grad, gate, up, activation):
    """Returns the gradients of gate and up."""
    dtype = compute_dtype(gate)
    dy = grad.to(dtype)
    g = gate.to(dtype)
    u = up.to(dtype)
    grad_gate = dy * u * _derivative(g, activation)
    return grad_gate.to(gate.dtype), (dy * _activate(g, activation)).to(up.dtype)


def _rows(tensor):
    """Returns the tensor as [rows, F] with unit stride in F.

    Half of a stacked projection [..., 2F] needs no copy.
    """
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        try:
            return tensor.view(-1, tensor.shape[-1])
        except RuntimeError:  # the leading dimensions cannot be merged without a copy
            pass
    return tensor.contiguous().view(-1, tensor.shape[-1])


def _launch_triton_glu(*arguments):
    from .triton_kernels.activation import launch_glu

    launch_glu(*arguments)


glu_op = Op(
    "glu",
    "Tensor gate, Tensor up, int activation",
    ("y",),
    allocate=lambda gate, up, activation: (empty_pooled(gate),),
    reference=glu_reference,
    prepare=lambda gate, up, activation: (
        same_dtype(gate, up) or (_rows(gate), _rows(up), activation)
    ),
    triton=_launch_triton_glu,
)


def _launch_triton_glu_backward(*arguments):
    from .triton_kernels.activation import launch_glu_backward

    launch_glu_backward(*arguments)


glu_backward_op = Op(
    "glu_backward",
    "Tensor grad, Tensor gate, Tensor up, int activation",
    ("grad_gate", "grad_up"),
    allocate=lambda grad, gate, up, activation: (empty_pooled(gate), empty_pooled(up)),
    reference=glu_backward_reference,
    prepare=lambda grad, gate, up, activation: (
        same_dtype(grad, gate, up) or (_rows(grad), _rows(gate), _rows(up), activation)
    ),
    triton=_launch_triton_glu_backward,
)


def _glu_setup_context(ctx, inputs, output):
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _glu_backward(ctx, grad):
    gate, up = ctx.saved_tensors
    return (*glu_backward_op(grad, gate, up, ctx.activation), None)


glu_op.autograd(_glu_setup_context, _glu_backward)


def _check_same_shape(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(
            f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must have the same shape [..., F]"
        )


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Returns gelu(gate) * up, both [..., F] with any row stride.

    `approximate` is "none" (erf) or "tanh" (T5 v1.1).
    """
    if approximate not in APPROXIMATIONS:
        raise ValueError(
            f"approximate must be {' or '.join(map(repr, APPROXIMATIONS))}, got {approximate!r}"
        )
    _check_same_shape(gate, up)
    return glu_op(gate, up, GELU_TANH if approximate == "tanh" else GELU)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, both [..., F] with any row stride."""
    _check_same_shape(gate, up)
    return glu_op(gate, up, SILU)


class _ReLU(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = torch.clamp_min(x, 0, out=empty_pooled(x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward.grad_input(
            grads[0], y, 0, grad_input=empty_pooled(y)
        )


def relu(x: Tensor) -> Tensor:
    """Computes `F.relu`.

    A large result on a CPU uses memory of the pool, and can then be differentiated only once.
    """
    if x.is_cpu and needs_gradient(x) and fits_pool(x.numel(), x):
        return _ReLU.apply(x)
    return F.relu(x)
