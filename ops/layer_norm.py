"""LayerNorm, optionally fused with the residual addition before it (Ba, Kiros and Hinton 2016).

    h = x + residual (rounded to x's dtype),   y = (h - mean) / sqrt(var + eps) * weight + bias

Calculated in fp32 (fp64 for fp64 input) and rounded once, as torch's layer_norm does.
"""

from __future__ import annotations

import torch

from .dispatch import same_dtype
from .library import Op, compute_dtype, empty_pooled, nothing


def reference(x, residual, weight, bias, eps):
    """The naive definition: (y, h or nothing, mean, 1 / standard deviation)."""
    h = x if residual is None else x + residual
    wide = h.to(compute_dtype(x))
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * rstd * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    summed = nothing(x) if residual is None else h
    return y.to(x.dtype), summed, mean.flatten(), rstd.flatten()


def backward_reference(grad, grad_summed, h, weight, mean, rstd, has_bias):
    """Gradients of h (which are those of x and of the residual), weight and bias; the last two are not rounded to a
    16-bit dtype, because ranks may still have to add theirs."""
    dtype = compute_dtype(h)
    rows = h.shape[:-1]
    wide, dy = h.to(dtype), grad.to(dtype)
    scale = rstd.reshape(*rows, 1)
    normalized = (wide - mean.reshape(*rows, 1)) * scale
    weighted = dy * weight.to(dtype)
    grad_x = weighted - weighted.mean(-1, keepdim=True)
    grad_x = scale * (grad_x - normalized * (weighted * normalized).mean(-1, keepdim=True))
    if grad_summed is not None:
        grad_x = grad_x + grad_summed.to(dtype)
    grad_weight = (dy * normalized).flatten(0, -2).sum(0)
    grad_bias = dy.flatten(0, -2).sum(0) if has_bias else nothing(weight)
    return grad_x.to(h.dtype), grad_weight, grad_bias


def _allocate(x, residual, weight, bias, eps):
    y = empty_pooled(x)
    summed = nothing(x) if residual is None else empty_pooled(x)
    rows = x.shape[:-1].numel()
    mean, rstd = (x.new_empty(rows, dtype=compute_dtype(x)) for _ in range(2))
    return y, summed, mean, rstd


def _allocate_backward(grad, grad_summed, h, weight, mean, rstd, has_bias):
    grad_x = empty_pooled(h)
    grad_weight, grad_bias = (weight.new_empty(weight.shape, dtype=compute_dtype(h)) for _ in range(2))
    return grad_x, grad_weight, grad_bias if has_bias else nothing(weight)


def _prepare(x, residual, weight, bias, eps):
    tensors = (x, residual, weight, bias)
    return same_dtype(*tensors) or (*(None if t is None else t.contiguous() for t in tensors), eps)


def _prepare_backward(grad, grad_summed, h, weight, mean, rstd, has_bias):
    tensors = (grad, grad_summed, h, weight)
    contiguous = (None if t is None else t.contiguous() for t in tensors)
    return same_dtype(*tensors) or (*contiguous, mean, rstd, has_bias)


forward_op = Op(
    "layer_norm",
    "Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps",
    ("y", "summed", "mean", "rstd"),
    allocate=_allocate,
    reference=reference,
    prepare=_prepare,
)
backward_op = Op(
    "layer_norm_backward",
    "Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor mean, Tensor rstd, bool has_bias",
    ("grad_x", "grad_weight", "grad_bias"),
    allocate=_allocate_backward,
    reference=backward_reference,
    prepare=_prepare_backward,
)


def _setup_context(ctx, inputs, output):
    x, residual, weight, bias, _ = inputs
    _, summed, mean, rstd = output
    ctx.has_residual, ctx.has_bias = residual is not None, bias is not None
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # the sum may have no gradient of its own
    ctx.save_for_backward(x if residual is None else summed, weight, mean, rstd)


def _backward(ctx, grad, grad_summed, grad_mean, grad_rstd):
    h, weight, mean, rstd = ctx.saved_tensors
    grad = torch.zeros_like(h) if grad is None else grad
    grad_x, grad_weight, grad_bias = backward_op(
        grad, grad_summed if ctx.has_residual else None, h, weight, mean, rstd, ctx.has_bias
    )
    return (
        grad_x,
        grad_x if ctx.has_residual else None,
        grad_weight.to(weight.dtype),
        grad_bias.to(weight.dtype) if ctx.has_bias else None,
        None,
    )


forward_op.autograd(_setup_context, _backward)


def check_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Raise ValueError unless weight is [H] of x [..., H] and the residual has x's shape."""
    if x.dim() == 0 or tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(
            f"a norm of x {tuple(x.shape)} needs a weight of its last dimension, got {tuple(weight.shape)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have the same shape")


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm of x [..., H] over its last dimension; weight and bias [H]. Returns x's shape and dtype."""
    check_norm(x, weight, None)
    return forward_op(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(LayerNorm of h, h) with h = x + residual, in one pass over memory. Shapes as in `layer_norm`."""
    check_norm(x, weight, residual)
    y, summed, _, _ = forward_op(x, residual, weight, bias, eps)
    return y, summed
