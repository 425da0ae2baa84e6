"""residual + dropout(x + bias), with the counter-based mask of `dropout_mask`, which no pass has to store.

Calculated in fp32 (fp64 for fp64 input) and rounded once.
"""

from __future__ import annotations

import torch

from .dispatch import same_dtype
from .dropout_mask import dropout_keep
from .library import Op, compute_dtype, empty_pooled, nothing


def _dropped(value, keys, p, first_row, first_column):
    if p == 0.0:
        return value
    keep = dropout_keep(keys, tuple(value.shape), p, first_row, first_column)
    return torch.where(keep, value / (1.0 - p), 0.0)


def reference(x, bias, residual, keys, p, first_row, first_column):
    """The naive definition; arguments as in the schema."""
    z = x.to(compute_dtype(x))
    if bias is not None:
        z = z + bias.to(z.dtype)
    z = _dropped(z, keys, p, first_row, first_column)
    if residual is not None:
        z = z + residual.to(z.dtype)
    return (z.to(x.dtype),)


def backward_reference(grad, keys, p, first_row, first_column, has_bias):
    """Gradients of x and of the bias; the residual's is `grad` itself."""
    grad_z = _dropped(grad.to(compute_dtype(grad)), keys, p, first_row, first_column)
    grad_bias = grad_z.flatten(0, -2).sum(0).to(grad.dtype) if has_bias else nothing(grad)
    return grad_z.to(grad.dtype), grad_bias


def _contiguous(*tensors):
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def _prepare(x, bias, residual, keys, p, first_row, first_column):
    return same_dtype(x, bias, residual) or (*_contiguous(x, bias, residual, keys), p, first_row, first_column)


def _prepare_backward(grad, keys, p, first_row, first_column, has_bias):
    return same_dtype(grad) or (*_contiguous(grad, keys), p, first_row, first_column, has_bias)


forward_op = Op(
    "bias_dropout_residual",
    "Tensor x, Tensor? bias, Tensor? residual, Tensor? keys, float p, SymInt first_row, SymInt first_column",
    ("y",),
    allocate=lambda x, *_: (empty_pooled(x),),
    reference=reference,
    prepare=_prepare,
)
backward_op = Op(
    "bias_dropout_residual_backward",
    "Tensor grad, Tensor? keys, float p, SymInt first_row, SymInt first_column, bool has_bias",
    ("grad_x", "grad_bias"),
    allocate=lambda grad, *rest: (
        empty_pooled(grad),
        grad.new_empty(grad.shape[-1]) if rest[-1] else nothing(grad),
    ),
    reference=backward_reference,
    prepare=_prepare_backward,
)


def _setup_context(ctx, inputs, output):
    _, bias, residual, keys, ctx.p, ctx.first_row, ctx.first_column = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(keys)


def _backward(ctx, grad):
    (keys,) = ctx.saved_tensors
    has_bias = ctx.bias_dtype is not None
    grad_x, grad_bias = backward_op(grad, keys, ctx.p, ctx.first_row, ctx.first_column, has_bias)
    grad_bias = grad_bias.to(ctx.bias_dtype) if has_bias else None
    grad_residual = None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype)
    return grad_x, grad_bias, grad_residual, None, None, None, None


forward_op.autograd(_setup_context, _backward)


def bias_dropout_residual(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    p: float,
    keys: torch.Tensor | None = None,
    first_row: int = 0,
    first_column: int = 0,
) -> torch.Tensor:
    """residual + dropout(x + bias).

    Args:
        x: [B, ..., C].
        bias: [C] or None.
        residual: x's shape, or None.
        p: probability of dropping an element; survivors are multiplied by 1 / (1 - p).
        keys: int64 [B] of `dropout_keys`; needed if p > 0.
        first_row, first_column: where x begins within the unsplit sample (see `dropout_keep`).

    Raises:
        ValueError: for shapes that do not fit, p outside [0, 1), or p > 0 without keys.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"a dropout probability must be at least 0 and less than 1, got {p}")
    if p and (keys is None or tuple(keys.shape) != (x.shape[0],) or keys.dtype != torch.int64):
        got = "none" if keys is None else f"shape {tuple(keys.shape)} {keys.dtype}"
        raise ValueError(
            f"dropout of x {tuple(x.shape)} needs one int64 key per sample, shape ({x.shape[0]},); got {got}"
        )
    if bias is not None and tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(f"the bias of x {tuple(x.shape)} has shape ({x.shape[-1]},), got {tuple(bias.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have the same shape")
    return forward_op(x, bias, residual, keys if p else None, float(p), first_row, first_column)


def dropout(
    x: torch.Tensor, p: float, keys: torch.Tensor | None, *, first_row: int = 0, first_column: int = 0
) -> torch.Tensor:
    """Counter-based dropout of x [B, ..., C]; arguments as in `bias_dropout_residual`."""
    if p == 0.0:
        return x
    return bias_dropout_residual(x, None, None, p=p, keys=keys, first_row=first_row, first_column=first_column)
