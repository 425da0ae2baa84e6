"""Between features and attention heads."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...ops.library import can_bypass_dispatcher, empty_pooled, needs_gradient


def split_heads(x: Tensor, head_size: int) -> Tensor:
    """[B, S, Hp] -> [B, Np, S, D]"""
    return x.unflatten(-1, (-1, head_size)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, Np, S, D] -> [B, S, Hp]"""
    return x.transpose(1, 2).flatten(2)


class _SplitFusedHeads(Function):
    """See `split_fused_heads`. The gradients are written where they belong; a sum of slices' gradients would first pad
    each one, and a concatenation would first merge the heads of each."""

    @staticmethod
    def forward(ctx, x: Tensor, blocks: int, head_size: int) -> tuple[Tensor, ...]:
        ctx.shape, ctx.head_size = x.shape, head_size
        return tuple(split_heads(block, head_size) for block in x.chunk(blocks, dim=-1))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        whole = empty_pooled(grads[0], *ctx.shape)
        for block, grad in zip(whole.chunk(len(grads), dim=-1), grads, strict=True):
            split_heads(block, ctx.head_size).copy_(grad)
        return whole, None, None


def split_fused_heads(x: Tensor, blocks: int, head_size: int) -> tuple[Tensor, ...]:
    """[B, S, blocks * Hp] -> for each block [B, Np, S, D]"""
    if needs_gradient(x) and can_bypass_dispatcher(x):
        return _SplitFusedHeads.apply(x, blocks, head_size)
    return tuple(split_heads(block, head_size) for block in x.chunk(blocks, dim=-1))
