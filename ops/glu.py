"""Gated linear units: act(gate) * up, with GELU (exact or tanh) or SiLU (Shazeer 2020).

Calculated in fp32 (fp64 for fp64 input) and rounded once.
"""

from __future__ import annotations

import torch

from .bias_gelu import APPROXIMATIONS, gelu, gelu_derivative
from .dispatch import same_dtype
from .library import Op, compute_dtype, empty_pooled

GELU, GELU_TANH, SILU = range(3)  # the schema's activation numbers


def _activate(z, activation):
    return z * torch.sigmoid(z) if activation == SILU else gelu(z, activation == GELU_TANH)


def _derivative(z, activation):
    if activation != SILU:
        return gelu_derivative(z, activation == GELU_TANH)
    s = torch.sigmoid(z)
    # s * (1 - s) is 0 at +-inf, where z * 0 must not make a NaN
    return s + torch.where((s == 0.0) | (s == 1.0), 0.0, z * s * (1.0 - s))


def reference(gate, up, activation):
    """act(gate) * up."""
    dtype = compute_dtype(gate)
    return ((_activate(gate.to(dtype), activation) * up.to(dtype)).to(gate.dtype),)


def backward_reference(grad, gate, up, activation):
    """Gradients of gate and up."""
    dtype = compute_dtype(gate)
    dy, g, u = grad.to(dtype), gate.to(dtype), up.to(dtype)
    grad_gate = dy * u * _derivative(g, activation)
    return grad_gate.to(gate.dtype), (dy * _activate(g, activation)).to(up.dtype)


def _rows(tensor):
    """The tensor as [rows, F] with unit stride in F: half of a stacked projection [..., 2F] needs no copy."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        try:
            return tensor.view(-1, tensor.shape[-1])
        except RuntimeError:  # the leading dimensions cannot be merged without a copy
            pass
    return tensor.contiguous().view(-1, tensor.shape[-1])


forward_op = Op(
    "glu",
    "Tensor gate, Tensor up, int activation",
    ("y",),
    allocate=lambda gate, up, activation: (empty_pooled(gate),),
    reference=reference,
    prepare=lambda gate, up, activation: same_dtype(gate, up) or (_rows(gate), _rows(up), activation),
)
backward_op = Op(
    "glu_backward",
    "Tensor grad, Tensor gate, Tensor up, int activation",
    ("grad_gate", "grad_up"),
    allocate=lambda grad, gate, up, activation: (empty_pooled(gate), empty_pooled(up)),
    reference=backward_reference,
    prepare=lambda grad, gate, up, activation: (
        same_dtype(grad, gate, up) or (_rows(grad), _rows(gate), _rows(up), activation)
    ),
)


def _setup_context(ctx, inputs, output):
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, grad):
    gate, up = ctx.saved_tensors
    return (*backward_op(grad, gate, up, ctx.activation), None)


forward_op.autograd(_setup_context, _backward)


def _checked(gate: torch.Tensor, up: torch.Tensor) -> None:
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must have the same shape [..., F]")


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(gate) * up: both [..., F] (rows may be strided); `approximate` is "none" (erf) or "tanh" (T5
    v1.1).
    """
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"GELU has approximate = {' or '.join(map(repr, APPROXIMATIONS))}, got {approximate!r}")
    _checked(gate, up)
    return forward_op(gate, up, GELU_TANH if approximate == "tanh" else GELU)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: both [..., F] (rows may be strided)."""
    _checked(gate, up)
    return forward_op(gate, up, SILU)
