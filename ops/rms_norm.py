"""RMSNorm, optionally fused with the residual addition before it (Zhang and Sennrich 2019; T5's LayerNorm).

    h = x + residual (rounded to x's dtype),   y = weight * round(h / sqrt(mean(h^2) + eps))

The mean of squares is taken in fp32 (fp64 for fp64 input), because fp16 squares overflow. The normalized
value is rounded to x's dtype before it is multiplied by the weight: the order of Hugging Face's T5 and Llama.
"""

from __future__ import annotations

import torch

from .dispatch import same_dtype
from .layer_norm import check_norm
from .library import Op, compute_dtype, empty_pooled, nothing


def reference(x, residual, weight, eps):
    """The naive definition: (y, h or nothing, 1 / root mean square)."""
    h = x if residual is None else x + residual
    wide = h.to(compute_dtype(x))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = weight * (wide * rstd).to(x.dtype)
    return y.to(x.dtype), nothing(x) if residual is None else h, rstd.flatten()


def backward_reference(grad, grad_summed, h, weight, rstd):
    """Gradients of h (which are those of x and of the residual) and weight, the latter not rounded (see layer_norm)."""
    dtype = compute_dtype(h)
    wide, dy = h.to(dtype), grad.to(dtype)
    scale = rstd.reshape(*h.shape[:-1], 1)
    normalized = wide * scale
    weighted = dy * weight.to(dtype)
    grad_x = scale * (weighted - normalized * (weighted * normalized).mean(-1, keepdim=True))
    if grad_summed is not None:
        grad_x = grad_x + grad_summed.to(dtype)
    return grad_x.to(h.dtype), (dy * normalized).flatten(0, -2).sum(0)


def _allocate(x, residual, weight, eps):
    y = empty_pooled(x)
    summed = nothing(x) if residual is None else empty_pooled(x)
    return y, summed, x.new_empty(x.shape[:-1].numel(), dtype=compute_dtype(x))


def _allocate_backward(grad, grad_summed, h, weight, rstd):
    return empty_pooled(h), weight.new_empty(weight.shape, dtype=compute_dtype(h))


def _prepare(x, residual, weight, eps):
    tensors = (x, residual, weight)
    return same_dtype(*tensors) or (*(None if t is None else t.contiguous() for t in tensors), eps)


def _prepare_backward(grad, grad_summed, h, weight, rstd):
    tensors = (grad, grad_summed, h, weight)
    return same_dtype(*tensors) or (*(None if t is None else t.contiguous() for t in tensors), rstd)


forward_op = Op(
    "rms_norm",
    "Tensor x, Tensor? residual, Tensor weight, float eps",
    ("y", "summed", "rstd"),
    allocate=_allocate,
    reference=reference,
    prepare=_prepare,
)
backward_op = Op(
    "rms_norm_backward",
    "Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor rstd",
    ("grad_x", "grad_weight"),
    allocate=_allocate_backward,
    reference=backward_reference,
    prepare=_prepare_backward,
)


def _setup_context(ctx, inputs, output):
    x, residual, weight, _ = inputs
    _, summed, rstd = output
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)  # the sum may have no gradient of its own
    ctx.save_for_backward(x if residual is None else summed, weight, rstd)


def _backward(ctx, grad, grad_summed, grad_rstd):
    h, weight, rstd = ctx.saved_tensors
    grad = torch.zeros_like(h) if grad is None else grad
    grad_x, grad_weight = backward_op(grad, grad_summed if ctx.has_residual else None, h, weight, rstd)
    return grad_x, grad_x if ctx.has_residual else None, grad_weight.to(weight.dtype), None


forward_op.autograd(_setup_context, _backward)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x [..., H] over its last dimension; weight [H]. Returns x's shape and dtype."""
    check_norm(x, weight, None)
    return forward_op(x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of h, h) with h = x + residual, in one pass over memory. Shapes as in `rms_norm`."""
    check_norm(x, weight, residual)
    y, summed, _ = forward_op(x, residual, weight, eps)
    return y, summed
