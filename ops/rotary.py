"""Rotates queries and keys to their positions (Su et al. 2021, arXiv:2104.09864).

Features 2i and 2i + 1 of a head (interleaved), or i and i + R/2, are a pair (a, b), which becomes
(a cos - b sin, b cos + a sin). Of a head's D features the first R rotate. Each product is rounded
to the dtype, and so is each sum, as in transformers. The gradient rotates by the opposite angles.

Shapes: B samples, N query heads, K key-value heads, S positions, D the size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu.pool import empty_pooled
from .registration import Op, contiguous, same_dtype


def split_pairs(x: Tensor, rotated: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of the first and the second feature of each pair, and of the features that do
    not rotate.
    """
    turning = x[..., :rotated]
    rest = x[..., rotated:]
    if interleaved:
        return turning[..., ::2], turning[..., 1::2], rest
    first, second = turning.chunk(2, dim=-1)
    return first, second, rest


# The definition, which the kernels are compared with.


def reference(q, k, cos, sin, interleaved, inverse):
    """Returns q [B, N, S, D] and k [B, K, S, D], rotated.

    Args:
        cos, sin: [B or 1, 1, S, R/2].
        interleaved: Whether neighboring features are a pair.
        inverse: Whether to rotate by the opposite angles.
    """
    return (_turn(q, cos, sin, interleaved, inverse), _turn(k, cos, sin, interleaved, inverse))


def _turn(x, cos, sin, interleaved, inverse):
    """Returns x [B, N, S, D], rotated, which is [B, S, N, D] in memory: so attention's output is
    too, and needs no copy to merge its heads. Each feature is written into its place.
    """
    x = x.transpose(1, 2)
    cos = cos.transpose(1, 2)
    sin = sin.transpose(1, 2)
    turned = empty_pooled(x)
    rotated = 2 * cos.shape[-1]
    first, second, rest = split_pairs(x, rotated, interleaved)
    turned_first, turned_second, turned_rest = split_pairs(turned, rotated, interleaved)
    torch.mul(first, cos, out=turned_first)
    product = second * sin
    turned_first.add_(product, alpha=1 if inverse else -1)
    torch.mul(second, cos, out=turned_second)
    turned_second.add_(torch.mul(first, sin, out=product), alpha=-1 if inverse else 1)
    turned_rest.copy_(rest)
    return turned.transpose(1, 2)


# The gradient formula.


def _setup_context(ctx, inputs, output):
    _, _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad_q, grad_k):
    cos, sin = ctx.saved_tensors
    grads = rotate_op(grad_q, grad_k, cos, sin, ctx.interleaved, not ctx.inverse)
    return *grads, None, None, None, None


# The registration.


def _allocate(q, k, *_):
    return _empty_heads(q), _empty_heads(k)


def _empty_heads(x):
    batch, heads, length, size = x.shape
    return empty_pooled(x, batch, length, heads, size).transpose(1, 2)


def _prepare(q, k, cos, sin, interleaved, inverse):
    return same_dtype(q, k, cos, sin) or (q, k, *contiguous(cos, sin), interleaved, inverse)


def _launch_triton(*arguments):
    from .triton_kernels.rotary import launch_rotation

    launch_rotation(*arguments)


rotate_op = Op(
    "rotate",
    "Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool inverse",
    ("turned_q", "turned_k"),
    allocate=_allocate,
    reference=reference,
    prepare=_prepare,
    compiled=(),
    triton=_launch_triton,
)

rotate_op.autograd(_setup_context, _backward)
