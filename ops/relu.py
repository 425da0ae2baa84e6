"""max(x, 0), where it is large on a CPU in the memory that ops/product.py is about."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .library import empty_pooled, needs_gradient
from .product import in_pool


class _ReLU(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = torch.clamp_min(x, 0, out=empty_pooled(x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward.grad_input(grads[0], y, 0, grad_input=empty_pooled(y))


def relu(x: Tensor) -> Tensor:
    """`F.relu`. Differentiable once where it is large."""
    return _ReLU.apply(x) if needs_gradient(x) and in_pool(x.numel(), x) else F.relu(x)
