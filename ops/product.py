"""Matrix products whose large results lie, on a CPU, in memory that earlier ones left (csrc/binding/pool.h).

Memory fresh from the system is faulted in when it is first written, which can take longer than the product itself: an
attention's scores are large for the arithmetic they take. The products are PyTorch's own, or oneDNN's (onednn.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import onednn
from .library import POOLED, can_bypass_dispatcher, empty_pooled, needs_gradient


def in_pool(elements: int, first: Tensor, *others: Tensor | None) -> bool:
    """Whether a result of so many elements, computed from these tensors, is to lie in the pool's memory: it is large,
    real, dense and on a CPU, and nothing traces, transforms, differentiates forwards or casts the computation."""
    return (
        first.is_cpu
        and first.is_floating_point()
        and elements * first.itemsize >= POOLED
        and all(other is None or other.dtype == first.dtype for other in others)
        and all(tensor is None or tensor.layout is torch.strided for tensor in (first, *others))
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and can_bypass_dispatcher(first, *others)
    )


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b without a gradient: a [..., M, K], b [..., K, N], their other dimensions the same."""
    if not in_pool(_elements(a, b.shape[-1]), a, b):
        return a @ b
    if a.dim() == 2 and onednn.suits(a, b.t(), None):
        return onednn.linear(a, b.t(), None)
    size = (*a.shape[:-1], b.shape[-1])
    if a.dim() > 2 and a.itemsize < 4:  # in 16 bits a copy is quicker than several products
        result = empty_pooled(a, *size)
        torch.bmm(_matrices(a), _matrices(b), out=result.flatten(0, -3))
    else:
        result = _laid_out_as(b, a, *size)
        _write_product(a, b, result)
    return result


def multiply_add(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias without a gradient: x [..., C], weight [F, C], bias [F]."""
    if not (_is_one_product(x, bias) and in_pool(_elements(x, weight.shape[0]), x, weight, bias)):
        return F.linear(x, weight, bias)
    if onednn.suits(x, weight, bias):
        return onednn.linear(x, weight, bias)
    result = empty_pooled(x, *x.shape[:-1], weight.shape[0])
    rows, out = x.flatten(0, -2), result.flatten(0, -2)
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)
    return result


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b: a [..., M, K], b [..., K, N], their other dimensions the same. Differentiable once where it is large."""
    if not needs_gradient(a, b):
        return multiply(a, b)
    largest = max(_elements(a, b.shape[-1]), a.numel(), b.numel())
    return _Product.apply(a, b) if in_pool(largest, a, b) else a @ b


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: x [..., C], weight [F, C], bias [F]. Differentiable once where it is large."""
    if not needs_gradient(x, weight, bias):
        return multiply_add(x, weight, bias)
    largest = max(_elements(x, weight.shape[0]), x.numel(), weight.numel())
    own = _is_one_product(x, bias) and in_pool(largest, x, weight, bias)
    return _Linear.apply(x, weight, bias) if own else F.linear(x, weight, bias)


def _is_one_product(x: Tensor, bias: Tensor | None) -> bool:
    """Whether `F.linear` adds the bias before it rounds, as `addmm` does."""
    return x.dim() > 1 and (bias is None or x.is_contiguous())


def _elements(rows: Tensor, columns: int) -> int:
    return rows.shape[:-1].numel() * columns


def _laid_out_as(b: Tensor, like: Tensor, *size: int) -> Tensor:
    """Unwritten: [B, N, M, K] with each row's N side by side if b has them so, as heads are in a layer's features."""
    if len(size) == 4 and b.stride(-1) == 1 and b.stride(1) < b.stride(2):
        return empty_pooled(like, size[0], size[2], size[1], size[3]).transpose(1, 2)
    return empty_pooled(like, *size)


def _write_product(a: Tensor, b: Tensor, result: Tensor) -> None:
    if result.dim() == 2:
        torch.mm(a, b, out=result)
    elif result.dim() == 3:
        torch.bmm(a, b, out=result)
    elif all(tensor.stride(0) == tensor.shape[1] * tensor.stride(1) for tensor in (a, b, result)):
        _write_product(a.flatten(0, 1), b.flatten(0, 1), result.flatten(0, 1))
    else:  # no one stride leads from matrix to matrix; copies that have one take up to half as long as the product
        for parts in zip(a, b, result, strict=True):
            _write_product(*parts)


def _matrices(tensor: Tensor) -> Tensor:
    """[..., M, N] -> [B, M, N]; a transposed view stays one, where `reshape` would transpose in memory."""
    return tensor.mT.flatten(0, -3).mT if tensor.stride(-2) == 1 else tensor.flatten(0, -3)


class _Product(Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return multiply(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        (grad,), (a, b) = grads, ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        grad_b = None
        if needs_b:  # in the layout of b
            grad_b = multiply(grad.mT, a).mT if b.stride(-2) == 1 else multiply(a.mT, grad)
        return multiply(grad, b.mT) if needs_a else None, grad_b


class _Linear(Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply_add(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        grad, (x, weight) = grads[0].flatten(0, -2), ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            multiply(grad, weight).view(x.shape) if needs_x else None,
            multiply(grad.t(), x.flatten(0, -2)) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )
