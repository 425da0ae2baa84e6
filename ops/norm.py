"""Computes LayerNorm and RMSNorm, optionally fused with the preceding residual addition.

    h = x + residual (rounded to x's dtype)
    LayerNorm (Ba, Kiros and Hinton 2016):  y = (h - mean) / sqrt(var + eps) * weight + bias
    RMSNorm (Zhang and Sennrich 2019):      y = weight * round(h / sqrt(mean(h^2) + eps))

Both are computed in fp32 (fp64 for fp64 input). LayerNorm is rounded once, as in PyTorch. RMSNorm
rounds the normalized value to the dtype of x before it multiplies by the weight, as Hugging Face's
T5 and Llama do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu import few_rows
from .cpu.pool import empty_pooled
from .dispatcher import in_inference_mode
from .registration import Op, compute_dtype, contiguous, empty_placeholder, same_dtype


def layer_norm_reference(x, residual, weight, bias, eps):
    """Computes the definition: (y, h or a placeholder, mean, 1 / standard deviation)."""
    h = x if residual is None else x + residual
    wide = h.to(compute_dtype(x))
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * rstd * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    summed = empty_placeholder(x) if residual is None else h
    return y.to(x.dtype), summed, mean.flatten(), rstd.flatten()


def layer_norm_backward_reference(grad, grad_summed, h, weight, mean, rstd, has_bias):
    """Returns the gradients of h (equal to those of x and of the residual), weight and bias.

    The last two are not rounded to a 16-bit dtype, because they may still be summed over ranks.
    """
    dtype = compute_dtype(h)
    rows = h.shape[:-1]
    wide = h.to(dtype)
    dy = grad.to(dtype)
    scale = rstd.reshape(*rows, 1)
    normalized = (wide - mean.reshape(*rows, 1)) * scale
    weighted = dy * weight.to(dtype)
    grad_x = weighted - weighted.mean(-1, keepdim=True)
    grad_x = scale * (grad_x - normalized * (weighted * normalized).mean(-1, keepdim=True))
    if grad_summed is not None:
        grad_x = grad_x + grad_summed.to(dtype)
    grad_weight = (dy * normalized).flatten(0, -2).sum(0)
    grad_bias = dy.flatten(0, -2).sum(0) if has_bias else empty_placeholder(weight)
    return grad_x.to(h.dtype), grad_weight, grad_bias


def _layer_norm_allocate(x, residual, weight, bias, eps):
    y = empty_pooled(x)
    summed = empty_placeholder(x) if residual is None else empty_pooled(x)
    rows = x.shape[:-1].numel()
    mean, rstd = (x.new_empty(rows, dtype=compute_dtype(x)) for _ in range(2))
    return y, summed, mean, rstd


def _layer_norm_allocate_backward(grad, grad_summed, h, weight, mean, rstd, has_bias):
    grad_x = empty_pooled(h)
    grad_weight, grad_bias = (
        weight.new_empty(weight.shape, dtype=compute_dtype(h)) for _ in range(2)
    )
    return grad_x, grad_weight, grad_bias if has_bias else empty_placeholder(weight)


def _layer_norm_prepare(x, residual, weight, bias, eps):
    return same_dtype(x, residual, weight, bias) or (*contiguous(x, residual, weight, bias), eps)


def _layer_norm_prepare_backward(grad, grad_summed, h, weight, mean, rstd, has_bias):
    tensors = (grad, grad_summed, h, weight)
    return same_dtype(*tensors) or (*contiguous(*tensors), mean, rstd, has_bias)


def _launch_triton_layer_norm(*arguments):
    from .triton_kernels.norm import launch_layer_norm

    launch_layer_norm(*arguments)


layer_norm_op = Op(
    "layer_norm",
    "Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps",
    ("y", "summed", "mean", "rstd"),
    allocate=_layer_norm_allocate,
    reference=layer_norm_reference,
    prepare=_layer_norm_prepare,
    triton=_launch_triton_layer_norm,
)


def _launch_triton_layer_norm_backward(*arguments):
    from .triton_kernels.norm import launch_layer_norm_backward

    launch_layer_norm_backward(*arguments)


layer_norm_backward_op = Op(
    "layer_norm_backward",
    "Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor mean, Tensor rstd, bool has_bias",
    ("grad_x", "grad_weight", "grad_bias"),
    allocate=_layer_norm_allocate_backward,
    reference=layer_norm_backward_reference,
    prepare=_layer_norm_prepare_backward,
    triton=_launch_triton_layer_norm_backward,
)


def _layer_norm_setup_context(ctx, inputs, output):
    x, residual, weight, bias, _ = inputs
    _, summed, mean, rstd = output
    ctx.has_residual = residual is not None
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # the sum may have no gradient
    ctx.save_for_backward(x if residual is None else summed, weight, mean, rstd)


def _layer_norm_backward(ctx, grad, grad_summed, grad_mean, grad_rstd):
    h, weight, mean, rstd = ctx.saved_tensors
    grad = torch.zeros_like(h) if grad is None else grad
    grad_x, grad_weight, grad_bias = layer_norm_backward_op(
        grad, grad_summed if ctx.has_residual else None, h, weight, mean, rstd, ctx.has_bias
    )
    return (
        grad_x,
        grad_x if ctx.has_residual else None,
        grad_weight.to(weight.dtype),
        grad_bias.to(weight.dtype) if ctx.has_bias else None,
        None,
    )


layer_norm_op.autograd(_layer_norm_setup_context, _layer_norm_backward)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns LayerNorm of x [..., H] over its last dimension, in the shape and dtype of x; weight
    and bias are [H].
    """
    if x.shape[-1:] != weight.shape:
        raise _mismatch(x, weight)
    return layer_norm_op(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns (LayerNorm of h, h) with h = x + residual, in one pass over memory.

    Shapes are as in `layer_norm`.
    """
    if x.shape[-1:] != weight.shape or residual.shape != x.shape:
        raise _mismatch(x, weight, residual)
    y, summed, _, _ = layer_norm_op(x, residual, weight, bias, eps)
    return y, summed


def rms_norm_reference(x, residual, weight, eps):
    """Computes the definition: (y, h or a placeholder, 1 / root mean square)."""
    h = x if residual is None else x + residual
    wide = h.to(compute_dtype(x))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = weight * (wide * rstd).to(x.dtype)
    return y.to(x.dtype), empty_placeholder(x) if residual is None else h, rstd.flatten()


def rms_norm_backward_reference(grad, grad_summed, h, weight, rstd):
    """Returns the gradients of h (equal to those of x and of the residual) and of the weight, the
    latter unrounded.
    """
    dtype = compute_dtype(h)
    wide = h.to(dtype)
    dy = grad.to(dtype)
    scale = rstd.reshape(*h.shape[:-1], 1)
    normalized = wide * scale
    weighted = dy * weight.to(dtype)
    grad_x = scale * (weighted - normalized * (weighted * normalized).mean(-1, keepdim=True))
    if grad_summed is not None:
        grad_x = grad_x + grad_summed.to(dtype)
    return grad_x.to(h.dtype), (dy * normalized).flatten(0, -2).sum(0)


def _rms_norm_allocate(x, residual, weight, eps):
    y = empty_pooled(x)
    summed = empty_placeholder(x) if residual is None else empty_pooled(x)
    return y, summed, x.new_empty(x.shape[:-1].numel(), dtype=compute_dtype(x))


def _rms_norm_allocate_backward(grad, grad_summed, h, weight, rstd):
    return empty_pooled(h), weight.new_empty(weight.shape, dtype=compute_dtype(h))


def _rms_norm_prepare(x, residual, weight, eps):
    return same_dtype(x, residual, weight) or (*contiguous(x, residual, weight), eps)


def _rms_norm_prepare_backward(grad, grad_summed, h, weight, rstd):
    return same_dtype(grad, grad_summed, h, weight) or (
        *contiguous(grad, grad_summed, h, weight),
        rstd,
    )


def _launch_triton_rms_norm(*arguments):
    from .triton_kernels.norm import launch_rms_norm

    launch_rms_norm(*arguments)


rms_norm_op = Op(
    "rms_norm",
    "Tensor x, Tensor? residual, Tensor weight, float eps",
    ("y", "summed", "rstd"),
    allocate=_rms_norm_allocate,
    reference=rms_norm_reference,
    prepare=_rms_norm_prepare,
    triton=_launch_triton_rms_norm,
)


def _launch_triton_rms_norm_backward(*arguments):
    from .triton_kernels.norm import launch_rms_norm_backward

    launch_rms_norm_backward(*arguments)


rms_norm_backward_op = Op(
    "rms_norm_backward",
    "Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor rstd",
    ("grad_x", "grad_weight"),
    allocate=_rms_norm_allocate_backward,
    reference=rms_norm_backward_reference,
    prepare=_rms_norm_prepare_backward,
    triton=_launch_triton_rms_norm_backward,
)


def _rms_norm_setup_context(ctx, inputs, output):
    x, residual, weight, _ = inputs
    _, summed, rstd = output
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)  # the sum may have no gradient
    ctx.save_for_backward(x if residual is None else summed, weight, rstd)


def _rms_norm_backward(ctx, grad, grad_summed, grad_rstd):
    h, weight, rstd = ctx.saved_tensors
    grad = torch.zeros_like(h) if grad is None else grad
    grad_x, grad_weight = rms_norm_backward_op(
        grad, grad_summed if ctx.has_residual else None, h, weight, rstd
    )
    return grad_x, grad_x if ctx.has_residual else None, grad_weight.to(weight.dtype), None


rms_norm_op.autograd(_rms_norm_setup_context, _rms_norm_backward)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns RMSNorm of x [..., H] over its last dimension, in the shape and dtype of x; weight is
    [H].
    """
    if x.shape[-1:] != weight.shape:
        raise _mismatch(x, weight)
    return rms_norm_op(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (RMSNorm of h, h) with h = x + residual, in one pass over memory.

    Shapes are as in `rms_norm`.
    """
    if x.shape[-1:] != weight.shape or residual.shape != x.shape:
        raise _mismatch(x, weight, residual)
    y, summed, _ = rms_norm_op(x, residual, weight, eps)
    return y, summed


def apply_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor | None]:
    """Returns (norm of h, h) with h = x + residual; without a residual, the second value has no
    meaning.

    The caller has checked the shapes, which are those of `layer_norm`. A decoding step on a CPU is
    one call into C++.

    Args:
        bias: Only of LayerNorm.
        kind: "layer_norm" or "rms_norm".
    """
    is_layer_norm = kind == "layer_norm"
    if x.is_cpu and in_inference_mode():
        y, h = few_rows.norm(x, residual, weight, bias, eps, centered=is_layer_norm)
        if y is not None:
            return y, h
    if is_layer_norm:
        y, h, _, _ = layer_norm_op(x, residual, weight, bias, eps)
    else:
        y, h, _ = rms_norm_op(x, residual, weight, eps)
    return y, h


def _mismatch(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> ValueError:
    if residual is not None and residual.shape != x.shape:
        return ValueError(
            f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have the same shape"
        )
    return ValueError(
        f"a norm of x {tuple(x.shape)} needs a weight of its last dimension, got {tuple(weight.shape)}"
    )
