"""Computes residual + dropout(x + bias), with a counter-based mask that is never stored.

The result is computed in fp32 (fp64 for fp64 input) and rounded once. `dropout_mask.py` defines
what is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu.pool import empty_pooled
from .dropout_mask import dropout_keep
from .registration import Op, compute_dtype, contiguous, empty_placeholder, same_dtype


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    p: float,
    keys: Tensor | None = None,
    first_row: int = 0,
    first_column: int = 0,
) -> Tensor:
    """Returns residual + dropout(x + bias), in the shape and dtype of x.

    Args:
        x: [B, ..., C].
        bias: [C] or None.
        residual: A tensor in the shape of x, or None.
        p: The probability of dropping an element; the other elements are multiplied by 1 / (1 - p).
        keys: int64 [B] from `dropout_keys`; required if p > 0.
        first_row: Where x begins within the unsplit sample (see `dropout_keep`).
        first_column: The same for columns.

    Raises:
        ValueError: The shapes do not match, p is outside [0, 1), or p > 0 without keys.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"a dropout probability must be at least 0 and less than 1, got {p}")
    if p and (keys is None or tuple(keys.shape) != (x.shape[0],) or keys.dtype != torch.int64):
        got = "none" if keys is None else f"shape {tuple(keys.shape)} {keys.dtype}"
        raise ValueError(
            f"dropout of x {tuple(x.shape)} needs one int64 key per sample, shape ({x.shape[0]},); got {got}"
        )
    if bias is not None and tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(
            f"the bias of x {tuple(x.shape)} has shape ({x.shape[-1]},), got {tuple(bias.shape)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have the same shape"
        )
    return bias_dropout_residual_op(
        x, bias, residual, keys if p else None, float(p), first_row, first_column
    )


def dropout(
    x: Tensor, p: float, keys: Tensor | None, *, first_row: int = 0, first_column: int = 0
) -> Tensor:
    """Returns dropout(x) of x [B, ..., C]; the arguments are those of `bias_dropout_residual`."""
    if p == 0.0:
        return x
    return bias_dropout_residual(
        x, None, None, p=p, keys=keys, first_row=first_row, first_column=first_column
    )


# The definition, which the kernels are compared with.


def reference(x, bias, residual, keys, p, first_row, first_column):
    """Computes the definition; the arguments are those of `bias_dropout_residual`."""
    z = x.to(compute_dtype(x))
    if bias is not None:
        z = z + bias.to(z.dtype)
    z = _drop(z, keys, p, first_row, first_column)
    if residual is not None:
        z = z + residual.to(z.dtype)
    return (z.to(x.dtype),)


def backward_reference(grad, keys, p, first_row, first_column, has_bias):
    """Returns the gradients of x [B, ..., C] and of the bias [C], which has size 0 without a bias.

    The gradient of the residual is `grad` itself.
    """
    grad_z = _drop(grad.to(compute_dtype(grad)), keys, p, first_row, first_column)
    if has_bias:
        grad_bias = grad_z.flatten(0, -2).sum(0).to(grad.dtype)
    else:
        grad_bias = empty_placeholder(grad)
    return grad_z.to(grad.dtype), grad_bias


def _drop(value, keys, p, first_row, first_column):
    """Returns dropout of `value` in its dtype."""
    if p == 0.0:
        return value
    keep = dropout_keep(keys, tuple(value.shape), p, first_row, first_column)
    return torch.where(keep, value / (1.0 - p), 0.0)


# The gradient formula.


def _setup_context(ctx, inputs, output):
    _, bias, residual, keys, ctx.p, ctx.first_row, ctx.first_column = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(keys)


def _backward(ctx, grad):
    (keys,) = ctx.saved_tensors
    has_bias = ctx.bias_dtype is not None
    grad_x, grad_bias = bias_dropout_residual_backward_op(
        grad, keys, ctx.p, ctx.first_row, ctx.first_column, has_bias
    )
    grad_bias = grad_bias.to(ctx.bias_dtype) if has_bias else None
    grad_residual = None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype)
    return grad_x, grad_bias, grad_residual, None, None, None, None


# The registration.


def _allocate(x, *_):
    return (empty_pooled(x),)


def _allocate_backward(grad, keys, p, first_row, first_column, has_bias):
    grad_bias = grad.new_empty(grad.shape[-1]) if has_bias else empty_placeholder(grad)
    return empty_pooled(grad), grad_bias


def _prepare(x, bias, residual, keys, p, first_row, first_column):
    tensors = contiguous(x, bias, residual, keys)
    return same_dtype(x, bias, residual) or (*tensors, p, first_row, first_column)


def _prepare_backward(grad, keys, p, first_row, first_column, has_bias):
    return same_dtype(grad) or (*contiguous(grad, keys), p, first_row, first_column, has_bias)


def _launch_triton(*arguments):
    from .triton_kernels.dropout import launch_forward

    launch_forward(*arguments)


def _launch_triton_backward(*arguments):
    from .triton_kernels.dropout import launch_backward

    launch_backward(*arguments)


bias_dropout_residual_op = Op(
    "bias_dropout_residual",
    "Tensor x, Tensor? bias, Tensor? residual, Tensor? keys, float p, SymInt first_row, SymInt first_column",
    ("y",),
    allocate=_allocate,
    reference=reference,
    prepare=_prepare,
    triton=_launch_triton,
)

bias_dropout_residual_backward_op = Op(
    "bias_dropout_residual_backward",
    "Tensor grad, Tensor? keys, float p, SymInt first_row, SymInt first_column, bool has_bias",
    ("grad_x", "grad_bias"),
    allocate=_allocate_backward,
    reference=backward_reference,
    prepare=_prepare_backward,
    triton=_launch_triton_backward,
)

bias_dropout_residual_op.autograd(_setup_context, _backward)
