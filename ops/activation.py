"""Computes activations: GELU of x + bias, gated linear units act(gate) * up, and ReLU.

    GELU (Hendrycks and Gimpel 2016):   z / 2 * (1 + erf(z / sqrt(2)))
    its approximation by tanh:          z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z^3)))
    SiLU:                               z / (1 + exp(-z))
    gated linear units (Shazeer 2020):  act(gate) * up, with GELU (GEGLU) or SiLU (SwiGLU)
    a clamped SwiGLU (gpt-oss):         min(gate, c) * sigmoid(a * min(gate, c)) * (up + 1),
                                        with up within [-c, c]

All are computed in fp32 (fp64 for fp64 input), including the bias addition, and rounded once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .autograd import Function, once_differentiable
from .cpu.pool import empty_pooled, fits_pool
from .dispatcher import needs_gradient
from .registration import Op, compute_dtype, contiguous, empty_placeholder, same_dtype

APPROXIMATIONS = ("none", "tanh")

# The values of `activation` in the schema of `glu`.
GELU = 0
GELU_TANH = 1
SILU = 2


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
        raise _approximation_error(approximate)
    if bias is not None and tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(
            f"the bias of x {tuple(x.shape)} has shape ({x.shape[-1]},), got {tuple(bias.shape)}"
        )
    return bias_gelu_op(x, bias, approximate == "tanh")


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Returns the clamped SwiGLU of gpt-oss, [..., F] in the dtype of gate_up.

    Args:
        gate_up: [..., 2F]; each feature of the gate, and then the same one of up.
        alpha: a, what the gate is multiplied by in the sigmoid.
        limit: c, the largest gate and the largest absolute value of up.
    """
    return clamped_swiglu_op(gate_up, float(alpha), float(limit))


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Returns gelu(gate) * up, [..., F] in their dtype.

    Args:
        gate: [..., F]; the rows may lie anywhere, so the halves of one projection need no copy.
        up: As gate.
        approximate: "none" (erf) or "tanh" (T5 v1.1).

    Raises:
        ValueError: The shapes differ, or `approximate` has another value.
    """
    if approximate not in APPROXIMATIONS:
        raise _approximation_error(approximate)
    _check_same_shape(gate, up)
    return glu_op(gate, up, GELU_TANH if approximate == "tanh" else GELU)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [..., F] in their dtype; the arguments are those of `geglu`."""
    _check_same_shape(gate, up)
    return glu_op(gate, up, SILU)


def relu(x: Tensor) -> Tensor:
    """Returns max(x, 0) in the shape and dtype of x, as `F.relu` does.

    A large result on a CPU uses memory of the pool, and can then be differentiated only once.
    """
    if x.is_cpu and needs_gradient(x) and fits_pool(x.numel(), x):
        return _ReLU.apply(x)
    return F.relu(x)


class _ReLU(Function):
    """Implements `relu` of a large tensor on a CPU: output and gradient use memory of the pool."""

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


def _approximation_error(approximate: str) -> ValueError:
    return ValueError(
        f"approximate must be {' or '.join(map(repr, APPROXIMATIONS))}, got {approximate!r}"
    )


def _check_same_shape(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(
            f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must have the same shape [..., F]"
        )


# The definitions, which the kernels are compared with.


def bias_gelu_reference(x, bias, tanh):
    """Computes the definition, gelu(x + bias), of x [..., F] and bias [F] or None."""
    z = _add_bias(x, bias)
    return (gelu(z, tanh).to(x.dtype),)


def bias_gelu_backward_reference(grad, x, bias, tanh):
    """Returns the gradients of x [..., F] and of the bias [F], which has size 0 without a bias."""
    z = _add_bias(x, bias)
    grad_z = grad.to(z.dtype) * gelu_derivative(z, tanh)
    if bias is None:
        grad_bias = empty_placeholder(x)
    else:
        grad_bias = grad_z.flatten(0, -2).sum(0).to(bias.dtype)
    return grad_z.to(x.dtype), grad_bias


def _add_bias(x, bias):
    """Returns x + bias in the dtype of the computation."""
    z = x.to(compute_dtype(x))
    return z if bias is None else z + bias.to(z.dtype)


def glu_reference(gate, up, activation):
    """Computes the definition, act(gate) * up, of gate and up [..., F]."""
    dtype = compute_dtype(gate)
    y = _activate(gate.to(dtype), activation) * up.to(dtype)
    return (y.to(gate.dtype),)


def glu_backward_reference(grad, gate, up, activation):
    """Returns the gradients of gate and up, [..., F] each."""
    dtype = compute_dtype(gate)
    dy = grad.to(dtype)
    g = gate.to(dtype)
    u = up.to(dtype)
    grad_gate = dy * u * _differentiate(g, activation)
    grad_up = dy * _activate(g, activation)
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype)


def _activate(z, activation):
    """Returns act(z)."""
    if activation == SILU:
        return z * torch.sigmoid(z)
    return gelu(z, activation == GELU_TANH)


def _differentiate(z, activation):
    """Returns the derivative of act at z."""
    if activation != SILU:
        return gelu_derivative(z, activation == GELU_TANH)
    s = torch.sigmoid(z)
    # s * (1 - s) is 0 at +-inf; without the `where`, z * 0 would be NaN there.
    return s + torch.where((s == 0.0) | (s == 1.0), 0.0, z * s * (1.0 - s))


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
    # The density is 0 where z is infinite; without the `where`, inf * 0 would be NaN.
    weighted = torch.where(density == 0.0, 0.0, z * density)
    return 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0))) + weighted


# The gradient formulas.


def _bias_gelu_setup_context(ctx, inputs, output):
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _bias_gelu_backward(ctx, grad):
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = bias_gelu_backward_op(grad, x, bias, ctx.tanh)
    return grad_x, None if bias is None else grad_bias, None


def _glu_setup_context(ctx, inputs, output):
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _glu_backward(ctx, grad):
    gate, up = ctx.saved_tensors
    grad_gate, grad_up = glu_backward_op(grad, gate, up, ctx.activation)
    return grad_gate, grad_up, None


# The registration of GELU.


def _allocate_bias_gelu(x, bias, tanh):
    return (empty_pooled(x),)


def _allocate_bias_gelu_backward(grad, x, bias, tanh):
    grad_bias = empty_placeholder(x) if bias is None else torch.empty_like(bias)
    return empty_pooled(x), grad_bias


def _prepare_bias_gelu(x, bias, tanh):
    return same_dtype(x, bias) or (*contiguous(x, bias), tanh)


def _prepare_bias_gelu_backward(grad, x, bias, tanh):
    return same_dtype(grad, x, bias) or (*contiguous(grad, x, bias), tanh)


def _launch_triton_bias_gelu(*arguments):
    from .triton_kernels.activation import launch_bias_gelu

    launch_bias_gelu(*arguments)


def _launch_triton_bias_gelu_backward(*arguments):
    from .triton_kernels.activation import launch_bias_gelu_backward

    launch_bias_gelu_backward(*arguments)


bias_gelu_op = Op(
    "bias_gelu",
    "Tensor x, Tensor? bias, bool tanh",
    ("y",),
    allocate=_allocate_bias_gelu,
    reference=bias_gelu_reference,
    prepare=_prepare_bias_gelu,
    triton=_launch_triton_bias_gelu,
)

bias_gelu_backward_op = Op(
    "bias_gelu_backward",
    "Tensor grad, Tensor x, Tensor? bias, bool tanh",
    ("grad_x", "grad_bias"),
    allocate=_allocate_bias_gelu_backward,
    reference=bias_gelu_backward_reference,
    prepare=_prepare_bias_gelu_backward,
    triton=_launch_triton_bias_gelu_backward,
)

bias_gelu_op.autograd(_bias_gelu_setup_context, _bias_gelu_backward)


# The registration of the gated linear units.


def _allocate_glu(gate, up, activation):
    return (empty_pooled(gate),)


def _allocate_glu_backward(grad, gate, up, activation):
    return empty_pooled(gate), empty_pooled(up)


def _prepare_glu(gate, up, activation):
    return same_dtype(gate, up) or (_flatten_rows(gate), _flatten_rows(up), activation)


def _prepare_glu_backward(grad, gate, up, activation):
    reason = same_dtype(grad, gate, up)
    return reason or (_flatten_rows(grad), _flatten_rows(gate), _flatten_rows(up), activation)


def _flatten_rows(tensor):
    """Returns the tensor as [rows, F] with unit stride in F.

    Half of a stacked projection [..., 2F] needs no copy.
    """
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        try:
            return tensor.view(-1, tensor.shape[-1])
        except RuntimeError:
            # The leading dimensions cannot be merged without a copy.
            pass
    return tensor.contiguous().view(-1, tensor.shape[-1])


def _launch_triton_glu(*arguments):
    from .triton_kernels.activation import launch_glu

    launch_glu(*arguments)


def _launch_triton_glu_backward(*arguments):
    from .triton_kernels.activation import launch_glu_backward

    launch_glu_backward(*arguments)


glu_op = Op(
    "glu",
    "Tensor gate, Tensor up, int activation",
    ("y",),
    allocate=_allocate_glu,
    reference=glu_reference,
    prepare=_prepare_glu,
    triton=_launch_triton_glu,
)

glu_backward_op = Op(
    "glu_backward",
    "Tensor grad, Tensor gate, Tensor up, int activation",
    ("grad_gate", "grad_up"),
    allocate=_allocate_glu_backward,
    reference=glu_backward_reference,
    prepare=_prepare_glu_backward,
    triton=_launch_triton_glu_backward,
)

glu_op.autograd(_glu_setup_context, _glu_backward)


# The clamped SwiGLU.


def _split_and_clamp(gate_up, limit):
    """Returns the gate and up + 1, clamped and widened, [..., F] each."""
    wide = gate_up.to(compute_dtype(gate_up))
    return wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit) + 1


def clamped_swiglu_reference(gate_up, alpha, limit):
    gate, up = _split_and_clamp(gate_up, limit)
    return ((gate * torch.sigmoid(gate * alpha) * up).to(gate_up.dtype),)


def clamped_swiglu_backward_reference(grad, gate_up, alpha, limit):
    gate, up = _split_and_clamp(gate_up, limit)
    wide = grad.to(gate.dtype)
    slope = torch.sigmoid(gate * alpha)
    grad_gate = wide * up * slope * (1 + alpha * gate * (1 - slope))
    grad_up = wide * gate * slope
    # What is clamped has no gradient.
    grad_gate = grad_gate.masked_fill(gate_up[..., ::2] > limit, 0)
    grad_up = grad_up.masked_fill(gate_up[..., 1::2].abs() > limit, 0)
    return (torch.stack([grad_gate, grad_up], -1).flatten(-2).to(gate_up.dtype),)


def _clamped_swiglu_setup_context(ctx, inputs, output):
    gate_up, ctx.alpha, ctx.limit = inputs
    ctx.save_for_backward(gate_up)


def _clamped_swiglu_backward(ctx, grad):
    (gate_up,) = ctx.saved_tensors
    return clamped_swiglu_backward_op(grad, gate_up, ctx.alpha, ctx.limit), None, None


clamped_swiglu_op = Op(
    "clamped_swiglu",
    "Tensor gate_up, float alpha, float limit",
    ("y",),
    allocate=lambda gate_up, *_: (gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),),
    reference=clamped_swiglu_reference,
    prepare=None,
    compiled=(),
)

clamped_swiglu_backward_op = Op(
    "clamped_swiglu_backward",
    "Tensor grad, Tensor gate_up, float alpha, float limit",
    ("grad_gate_up",),
    allocate=lambda grad, gate_up, *_: (torch.empty_like(gate_up),),
    reference=clamped_swiglu_backward_reference,
    prepare=None,
    compiled=(),
)

clamped_swiglu_op.autograd(_clamped_swiglu_setup_context, _clamped_swiglu_backward)
