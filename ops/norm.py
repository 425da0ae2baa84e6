"""Computes LayerNorm and RMSNorm, optionally fused with the preceding residual addition.

    h = x + residual (rounded to x's dtype)
    LayerNorm (Ba, Kiros and Hinton 2016):  y = (h - mean) / sqrt(var + eps) * weight + bias
    RMSNorm (Zhang and Sennrich 2019):      y = weight * round(h / sqrt(mean(h^2) + eps))
    RMSNorm with an offset:                 y = (weight + offset) * h / sqrt(mean(h^2) + eps)

Both are computed in fp32 (fp64 for fp64 input). LayerNorm is rounded once, as in PyTorch. RMSNorm
rounds the normalized value to the dtype of x before it multiplies by the weight, as Hugging Face's
T5 and Llama do. With an offset it is rounded once, as Gemma, whose offset is 1, and OLMo 2, whose
offset is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu import few_rows
from .cpu.pool import empty_pooled
from .dispatcher import in_inference_mode
from .registration import Op, compute_dtype, contiguous, empty_placeholder, same_dtype


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Computes LayerNorm over the last dimension.

    Args:
        x: [..., H], fp32, bf16, fp16 or fp64.
        weight: [H].
        bias: [H] or None.
        eps: Added to the variance.

    Returns:
        [..., H], in the dtype of x.
    """
    if x.shape[-1:] != weight.shape:
        raise _mismatch(x, weight)
    return layer_norm_op(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Adds a residual and computes LayerNorm of the sum, in one pass over memory.

    Args:
        x: [..., H].
        residual: [..., H].
        weight: [H].
        bias: [H] or None.
        eps: Added to the variance.

    Returns:
        The norm of h = x + residual, and h itself, both [..., H] in the dtype of x.
    """
    if x.shape[-1:] != weight.shape or residual.shape != x.shape:
        raise _mismatch(x, weight, residual)
    y, summed, _, _ = layer_norm_op(x, residual, weight, bias, eps)
    return y, summed


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float | None = None) -> Tensor:
    """Computes RMSNorm over the last dimension.

    Args:
        x: [..., H], fp32, bf16, fp16 or fp64.
        weight: [H].
        eps: Added to the mean of the squares.
        offset: Added to the weight in fp32, with the product rounded once; None for a product with
            the rounded value.

    Returns:
        [..., H], in the dtype of x.
    """
    if x.shape[-1:] != weight.shape:
        raise _mismatch(x, weight)
    return _normalize(x, None, weight, eps, offset)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float | None = None
) -> tuple[Tensor, Tensor]:
    """Adds a residual and computes RMSNorm of the sum, in one pass over memory.

    The other arguments are those of `rms_norm`.

    Returns:
        The norm of h = x + residual, and h itself, both [..., H] in the dtype of x.
    """
    if x.shape[-1:] != weight.shape or residual.shape != x.shape:
        raise _mismatch(x, weight, residual)
    y, summed, _ = _normalize(x, residual, weight, eps, offset)
    return y, summed


def apply_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
    offset: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes either norm of h = x + residual, for a caller who has checked the shapes.

    A decoding step on a CPU is one call into C++.

    Args:
        x: [..., H].
        residual: [..., H], or None for h = x.
        weight: [H].
        bias: [H] or None; only LayerNorm has one.
        kind: "layer_norm", "rms_norm" or, with an offset, "offset_rms_norm".
        offset: That of `rms_norm`.

    Returns:
        The norm of h, and h; without a residual, the second value has no meaning.
    """
    is_layer_norm = kind == "layer_norm"
    if x.is_cpu and offset is None and in_inference_mode():
        y, h = few_rows.norm(x, residual, weight, bias, eps, centered=is_layer_norm)
        if y is not None:
            return y, h
    if is_layer_norm:
        y, h, _, _ = layer_norm_op(x, residual, weight, bias, eps)
    elif offset is None:
        y, h, _ = rms_norm_op(x, residual, weight, eps)
    else:
        y, h, _ = offset_rms_norm_op(x, residual, weight, eps, offset)
    return y, h


def _normalize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    if offset is None:
        return rms_norm_op(x, residual, weight, eps)
    return offset_rms_norm_op(x, residual, weight, eps, offset)


def _mismatch(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> ValueError:
    if residual is not None and residual.shape != x.shape:
        return ValueError(
            f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have the same shape"
        )
    return ValueError(
        f"a norm of x {tuple(x.shape)} needs a weight of its last dimension, got {tuple(weight.shape)}"
    )


# The definitions, which the kernels are compared with.


def layer_norm_reference(x, residual, weight, bias, eps):
    """Computes the definition of LayerNorm.

    Args:
        x: [..., H].
        residual: [..., H] or None.
        weight: [H].
        bias: [H] or None.

    Returns:
        y: [..., H], the norm of h, in the dtype of x.
        summed: [..., H], h in the dtype of x; without a residual a tensor of size 0.
        mean: [rows], the mean of each row of h, in the dtype of the computation.
        rstd: [rows], 1 / sqrt(var + eps) of each row of h, in the dtype of the computation.
    """
    h = x if residual is None else x + residual
    wide = h.to(compute_dtype(x))
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * rstd * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    summed = empty_placeholder(x) if residual is None else h
    return y.to(x.dtype), summed, mean.flatten(), rstd.flatten()


def layer_norm_backward_reference(grad, grad_summed, h, weight, mean, rstd, has_bias, wide_sums):
    """Returns the gradients of h, weight and bias.

    With n = (h - mean) * rstd and g = grad * weight, the gradient of h is
    rstd * (g - mean(g) - n * mean(g * n)). It is that of x and that of the residual, too.

    Args:
        grad: [..., H], the gradient of y.
        grad_summed: [..., H], the gradient of h from its other uses, or None.
        h: [..., H], the sum that was normalized.
        mean: [rows], as the forward pass returns it.
        rstd: [rows], as the forward pass returns it.
        has_bias: Whether there is a bias; without one, its gradient has size 0.
        wide_sums: Whether the gradients of weight and bias are in the dtype of the computation, because they
            are still summed over ranks.

    Returns:
        grad_x: [..., H], in the dtype of h.
        grad_weight: [H], in the dtype of the weight, or wide.
        grad_bias: [H], as grad_weight.
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
    if not wide_sums:
        grad_weight = grad_weight.to(weight.dtype)
        grad_bias = grad_bias.to(weight.dtype)
    return grad_x.to(h.dtype), grad_weight, grad_bias


def rms_norm_reference(x, residual, weight, eps):
    """Computes the definition of RMSNorm.

    Args:
        x: [..., H].
        residual: [..., H] or None.
        weight: [H].

    Returns:
        y: [..., H], the norm of h, in the dtype of x.
        summed: [..., H], h in the dtype of x; without a residual a tensor of size 0.
        rstd: [rows], 1 / sqrt(mean(h^2) + eps) of each row, in the dtype of the computation.
    """
    h = x if residual is None else x + residual
    wide = h.to(compute_dtype(x))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = weight * (wide * rstd).to(x.dtype)
    summed = empty_placeholder(x) if residual is None else h
    return y.to(x.dtype), summed, rstd.flatten()


def offset_rms_norm_reference(x, residual, weight, eps, offset):
    """Computes the definition of RMSNorm with an offset; see `rms_norm_reference`."""
    h = x if residual is None else x + residual
    wide = h.to(compute_dtype(x))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = (weight.to(wide.dtype) + offset) * (wide * rstd)
    summed = empty_placeholder(x) if residual is None else h
    return y.to(x.dtype), summed, rstd.flatten()


def rms_norm_backward_reference(grad, grad_summed, h, weight, rstd, *settings):
    """Returns the gradients of h and of the weight, as `layer_norm_backward_reference` does.

    With n = h * rstd and g = grad * (weight + offset), the gradient of h is
    rstd * (g - n * mean(g * n)).

    Args:
        settings: The offset, if the norm has one, and `wide_sums`.
    """
    *offset, wide_sums = settings
    dtype = compute_dtype(h)
    wide = h.to(dtype)
    dy = grad.to(dtype)
    scale = rstd.reshape(*h.shape[:-1], 1)
    normalized = wide * scale
    weighted = dy * (weight.to(dtype) + sum(offset))
    grad_x = scale * (weighted - normalized * (weighted * normalized).mean(-1, keepdim=True))
    if grad_summed is not None:
        grad_x = grad_x + grad_summed.to(dtype)
    grad_weight = (dy * normalized).flatten(0, -2).sum(0)
    return grad_x.to(h.dtype), grad_weight if wide_sums else grad_weight.to(weight.dtype)


# The gradient formulas.


def _layer_norm_setup_context(ctx, inputs, output):
    x, residual, weight, bias, _ = inputs
    _, summed, mean, rstd = output
    ctx.has_residual = residual is not None
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(mean, rstd)
    # The sum may have no gradient, which is then None instead of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else summed, weight, mean, rstd)


def _layer_norm_backward(ctx, grad, grad_summed, grad_mean, grad_rstd):
    h, weight, mean, rstd = ctx.saved_tensors
    grad = torch.zeros_like(h) if grad is None else grad
    grad_x, grad_weight, grad_bias = layer_norm_backward_op(
        grad, grad_summed if ctx.has_residual else None, h, weight, mean, rstd, ctx.has_bias, False
    )
    grad_residual = grad_x if ctx.has_residual else None
    return grad_x, grad_residual, grad_weight, grad_bias if ctx.has_bias else None, None


def _rms_norm_setup_context(ctx, inputs, output):
    x, residual, weight, _, *ctx.offset = inputs  # the offset, if the operator has one
    _, summed, rstd = output
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(rstd)
    # The sum may have no gradient, which is then None instead of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else summed, weight, rstd)


def _rms_norm_backward(ctx, grad, grad_summed, grad_rstd):
    h, weight, rstd = ctx.saved_tensors
    grad = torch.zeros_like(h) if grad is None else grad
    operator = offset_rms_norm_backward_op if ctx.offset else rms_norm_backward_op
    grad_x, grad_weight = operator(
        grad, grad_summed if ctx.has_residual else None, h, weight, rstd, *ctx.offset, False
    )
    grad_residual = grad_x if ctx.has_residual else None
    settings = (None,) * (1 + len(ctx.offset))
    return grad_x, grad_residual, grad_weight, *settings


# The registration of LayerNorm.


def _allocate_layer_norm(x, residual, weight, bias, eps):
    y = empty_pooled(x)
    summed = empty_placeholder(x) if residual is None else empty_pooled(x)
    rows = x.shape[:-1].numel()
    dtype = compute_dtype(x)
    mean = x.new_empty(rows, dtype=dtype)
    rstd = x.new_empty(rows, dtype=dtype)
    return y, summed, mean, rstd


def _allocate_layer_norm_backward(grad, grad_summed, h, weight, mean, rstd, has_bias, wide_sums):
    grad_x = empty_pooled(h)
    dtype = compute_dtype(h) if wide_sums else weight.dtype
    grad_weight = weight.new_empty(weight.shape, dtype=dtype)
    if has_bias:
        grad_bias = weight.new_empty(weight.shape, dtype=dtype)
    else:
        grad_bias = empty_placeholder(weight)
    return grad_x, grad_weight, grad_bias


def _prepare_layer_norm(x, residual, weight, bias, eps):
    return same_dtype(x, residual, weight, bias) or (*contiguous(x, residual, weight, bias), eps)


def _prepare_layer_norm_backward(grad, grad_summed, h, weight, mean, rstd, has_bias, wide_sums):
    tensors = (grad, grad_summed, h, weight)
    return same_dtype(*tensors) or (*contiguous(*tensors), mean, rstd, has_bias)


def _launch_triton_layer_norm(*arguments):
    from .triton_kernels.norm import launch_layer_norm

    launch_layer_norm(*arguments)


def _launch_triton_layer_norm_backward(*arguments):
    from .triton_kernels.norm import launch_layer_norm_backward

    launch_layer_norm_backward(*arguments)


layer_norm_op = Op(
    "layer_norm",
    "Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps",
    ("y", "summed", "mean", "rstd"),
    allocate=_allocate_layer_norm,
    reference=layer_norm_reference,
    prepare=_prepare_layer_norm,
    triton=_launch_triton_layer_norm,
)

layer_norm_backward_op = Op(
    "layer_norm_backward",
    "Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor mean, Tensor rstd, bool has_bias, "
    "bool wide_sums",
    ("grad_x", "grad_weight", "grad_bias"),
    allocate=_allocate_layer_norm_backward,
    reference=layer_norm_backward_reference,
    prepare=_prepare_layer_norm_backward,
    triton=_launch_triton_layer_norm_backward,
)

layer_norm_op.autograd(_layer_norm_setup_context, _layer_norm_backward)


# The registration of RMSNorm.


def _allocate_rms_norm(x, residual, weight, eps, *offset):
    y = empty_pooled(x)
    summed = empty_placeholder(x) if residual is None else empty_pooled(x)
    rstd = x.new_empty(x.shape[:-1].numel(), dtype=compute_dtype(x))
    return y, summed, rstd


def _allocate_rms_norm_backward(grad, grad_summed, h, weight, rstd, *settings):
    dtype = compute_dtype(h) if settings[-1] else weight.dtype
    return empty_pooled(h), weight.new_empty(weight.shape, dtype=dtype)


def _prepare_rms_norm(x, residual, weight, eps, *offset):
    return same_dtype(x, residual, weight) or (*contiguous(x, residual, weight), eps, *offset)


def _prepare_rms_norm_backward(grad, grad_summed, h, weight, rstd, *settings):
    tensors = (grad, grad_summed, h, weight)
    return same_dtype(*tensors) or (*contiguous(*tensors), rstd, *settings[:-1])


def _launch_triton_rms_norm(*arguments):
    from .triton_kernels.norm import launch_rms_norm

    launch_rms_norm(*arguments)


def _launch_triton_rms_norm_backward(*arguments):
    from .triton_kernels.norm import launch_rms_norm_backward

    launch_rms_norm_backward(*arguments)


rms_norm_op = Op(
    "rms_norm",
    "Tensor x, Tensor? residual, Tensor weight, float eps",
    ("y", "summed", "rstd"),
    allocate=_allocate_rms_norm,
    reference=rms_norm_reference,
    prepare=_prepare_rms_norm,
    triton=_launch_triton_rms_norm,
)

rms_norm_backward_op = Op(
    "rms_norm_backward",
    "Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor rstd, bool wide_sums",
    ("grad_x", "grad_weight"),
    allocate=_allocate_rms_norm_backward,
    reference=rms_norm_backward_reference,
    prepare=_prepare_rms_norm_backward,
    triton=_launch_triton_rms_norm_backward,
)

rms_norm_op.autograd(_rms_norm_setup_context, _rms_norm_backward)


def _launch_triton_offset_rms_norm(*arguments):
    from .triton_kernels.norm import launch_offset_rms_norm

    launch_offset_rms_norm(*arguments)


def _launch_triton_offset_rms_norm_backward(*arguments):
    from .triton_kernels.norm import launch_offset_rms_norm_backward

    launch_offset_rms_norm_backward(*arguments)


offset_rms_norm_op = Op(
    "offset_rms_norm",
    "Tensor x, Tensor? residual, Tensor weight, float eps, float offset",
    ("y", "summed", "rstd"),
    allocate=_allocate_rms_norm,
    reference=offset_rms_norm_reference,
    prepare=_prepare_rms_norm,
    triton=_launch_triton_offset_rms_norm,
)

offset_rms_norm_backward_op = Op(
    "offset_rms_norm_backward",
    "Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor rstd, float offset, bool wide_sums",
    ("grad_x", "grad_weight"),
    allocate=_allocate_rms_norm_backward,
    reference=rms_norm_backward_reference,
    prepare=_prepare_rms_norm_backward,
    triton=_launch_triton_offset_rms_norm_backward,
)

offset_rms_norm_op.autograd(_rms_norm_setup_context, _rms_norm_backward)
