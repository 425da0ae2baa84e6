"""Computes residual + dropout(x + bias), with a counter-based mask that is never stored.

The result is computed in fp32 (fp64 for fp64 input) and rounded once. Whether an element is kept is an integer function
of the seed, the site (which dropout of the model), the visit (which use of the site), the global sample index, and the
element's row and column in the sample's unsplit tensor. In attention probabilities the row is head * 2^32 + query and
the column is the key. All arithmetic is on unsigned integers modulo 2^64 or 2^32, so PyTorch, C++, CUDA and Triton
compute identical bits:

    mix64(z): z ^= z >> 30; z *= 0xbf58476d1ce4e5b9; z ^= z >> 27; z *= 0x94d049bb133111eb; z ^= z >> 31
    chain(key, value) = mix64(key + 0x9e3779b97f4a7c15 * (value + 1))
    key of a use = chain(chain(mix64(seed), site), visit);  key of a sample = chain(key of the use, sample)
    key of a row = chain(key of the sample, row);  low, high = its halves
    h = low + column;  h ^= h >> 16;  h *= 0x21f0aaad;  h ^= high;  h ^= h >> 15;  h *= 0x735a2d97;  h ^= h >> 15
    kept = h >= round(p * 2^32)

mix64 is the finalizer of SplitMix64 (Steele et al. 2014); the 32-bit constants are Wellons' low-bias constants.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from .library import Op, compute_dtype, contiguous, empty_placeholder, empty_pooled, same_dtype

_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def _dropped(value, keys, p, first_row, first_column):
    if p == 0.0:
        return value
    keep = dropout_keep(keys, tuple(value.shape), p, first_row, first_column)
    return torch.where(keep, value / (1.0 - p), 0.0)


def reference(x, bias, residual, keys, p, first_row, first_column):
    """Computes the definition. The arguments are as in the schema."""
    z = x.to(compute_dtype(x))
    if bias is not None:
        z = z + bias.to(z.dtype)
    z = _dropped(z, keys, p, first_row, first_column)
    if residual is not None:
        z = z + residual.to(z.dtype)
    return (z.to(x.dtype),)


def backward_reference(grad, keys, p, first_row, first_column, has_bias):
    """Returns the gradients of x and of the bias. The gradient of the residual is `grad` itself."""
    grad_z = _dropped(grad.to(compute_dtype(grad)), keys, p, first_row, first_column)
    grad_bias = grad_z.flatten(0, -2).sum(0).to(grad.dtype) if has_bias else empty_placeholder(grad)
    return grad_z.to(grad.dtype), grad_bias


def _prepare(x, bias, residual, keys, p, first_row, first_column):
    return same_dtype(x, bias, residual) or (
        *contiguous(x, bias, residual, keys),
        p,
        first_row,
        first_column,
    )


def _prepare_backward(grad, keys, p, first_row, first_column, has_bias):
    return same_dtype(grad) or (*contiguous(grad, keys), p, first_row, first_column, has_bias)


bias_dropout_residual_op = Op(
    "bias_dropout_residual",
    "Tensor x, Tensor? bias, Tensor? residual, Tensor? keys, float p, SymInt first_row, SymInt first_column",
    ("y",),
    allocate=lambda x, *_: (empty_pooled(x),),
    reference=reference,
    prepare=_prepare,
)
bias_dropout_residual_backward_op = Op(
    "bias_dropout_residual_backward",
    "Tensor grad, Tensor? keys, float p, SymInt first_row, SymInt first_column, bool has_bias",
    ("grad_x", "grad_bias"),
    allocate=lambda grad, *rest: (
        empty_pooled(grad),
        grad.new_empty(grad.shape[-1]) if rest[-1] else empty_placeholder(grad),
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
    grad_x, grad_bias = bias_dropout_residual_backward_op(
        grad, keys, ctx.p, ctx.first_row, ctx.first_column, has_bias
    )
    grad_bias = grad_bias.to(ctx.bias_dtype) if has_bias else None
    grad_residual = None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype)
    return grad_x, grad_bias, grad_residual, None, None, None, None


bias_dropout_residual_op.autograd(_setup_context, _backward)


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
    """Returns residual + dropout(x + bias).

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
    """Returns counter-based dropout of x [B, ..., C]. The arguments are as in `bias_dropout_residual`."""
    if p == 0.0:
        return x
    return bias_dropout_residual(
        x, None, None, p=p, keys=keys, first_row=first_row, first_column=first_column
    )


def _signed(value: int) -> int:
    """Returns the signed integer with the bits of `value` modulo 2^64, because PyTorch has no unsigned arithmetic."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _chain(key: Tensor, value: Tensor) -> Tensor:
    z = key + (value + 1) * _signed(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def use_key(seed: int, site: int, visit: int) -> int:
    """Returns the 64-bit key of the use `visit` of a dropout: chain(chain(mix64(seed), site), visit)."""
    key = _mix64(seed & _MASK64)
    for value in (site, visit):
        key = _mix64((key + _GOLDEN * (value + 1)) & _MASK64)
    return key


def dropout_keys(
    key: int | list[int], first_sample: int, batch: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns one key per sample, chain(key, first_sample + b): int64 [batch], or [uses, batch] for several keys.

    Args:
        key: The 64-bit key of one use, or those of several.
        first_sample: The number of the first sample in the run.
        batch: The number of samples.
    """
    samples = torch.arange(first_sample, first_sample + batch, device=device)
    if isinstance(key, int):
        return _chain(torch.full_like(samples, _signed(key)), samples)
    return _chain(torch.tensor([_signed(use) for use in key], device=device)[:, None], samples)


def row_keys(keys: Tensor, rows: Tensor) -> Tensor:
    """Returns the keys of the rows int64 [R] of each sample, int64 [B, R]."""
    return _chain(keys.reshape(-1, 1), rows)


def keys_from_row(keys: Tensor, first_row: int | Tensor) -> Tensor:
    """Returns keys with which row r has the mask that row first_row + r has with `keys`.

    The key of a row depends on the sum of the sample's key and a multiple of the row.
    """
    return keys + (
        first_row * _signed(_GOLDEN)
        if isinstance(first_row, Tensor)
        else _signed(_GOLDEN * first_row)
    )


def attention_rows(first_head: int, heads: int, queries: int, device: torch.device | str) -> Tensor:
    """Returns the row of each (head, query) in attention probabilities, int64 [heads * queries]: head * 2^32 + query.

    So the mask of a head does not depend on the number of queries, which padding changes.
    """
    numbers = torch.arange(first_head, first_head + heads, device=device)
    return ((numbers << 32)[:, None] + torch.arange(queries, device=device)).flatten()


def dropout_threshold(p: float) -> int:
    """Returns the 32-bit hash below which elements are dropped. Raises ValueError unless 0 <= p < 1."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"a dropout probability must be at least 0 and less than 1, got {p}")
    return min(round(p * 2**32), _LOW)


def dropout_keep(
    keys: Tensor, shape: tuple[int, ...], p: float, first_row: int = 0, first_column: int = 0
) -> Tensor:
    """Returns the boolean mask of kept elements for a tensor [B, ..., C].

    Args:
        keys: int64 [B] from `dropout_keys`.
        shape: The tensor's shape. The dimensions between the first and the last are the rows of a sample.
        p: The probability of dropping an element.
        first_row: Where the tensor begins within the sample's unsplit tensor. A rank with positions [s0, s0 + Sp) of
            [S, F] has first_row = s0.
        first_column: The same for columns: a rank with columns [f0, f0 + Fp) of [S, F] has first_column = f0.
    """
    rows = torch.arange(first_row, first_row + prod(shape[1:-1]), device=keys.device)
    return kept_elements(row_keys(keys, rows), shape[-1], p, first_column).reshape(shape)


def kept_elements(of_rows: Tensor, columns: int, p: float, first_column: int = 0) -> Tensor:
    """Returns the boolean mask [B, R, columns] of kept elements in rows with the keys int64 [B, R]."""
    column = torch.arange(first_column, first_column + columns, device=of_rows.device)
    h = ((of_rows[:, :, None] & _LOW) + column) & _LOW
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & _LOW
    h = h ^ _shift_right(of_rows[:, :, None], 32)
    h = ((h ^ (h >> 15)) * 0x735A2D97) & _LOW
    h = h ^ (h >> 15)
    return h >= dropout_threshold(p)
