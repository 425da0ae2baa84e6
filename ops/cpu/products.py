"""Computes large matrix products of CPU tensors, in memory of the pool and with our kernel
(csrc/matmul/).

Our kernel runs where PyTorch has no library for a 16-bit type, as on processors without AVX-512,
and on AMD processors with AVX512-BF16, where PyTorch's libraries run AVX2 in fp32 and are slower
for many shapes in bf16. Each sum is computed in fp32 in an order that depends only on its length,
and rounded once. Smaller products, and all that is traced, transformed or cast, are PyTorch's.
Compiled code calls a large product as one operator, which chooses when it runs.

The reference of each function is the PyTorch function in its docstring.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import library, registration, variants
from ..autograd import Function, once_differentiable
from ..compiling import assume_constant_result
from ..dispatcher import flop_counters, needs_gradient
from .pool import MIN_POOLED_BYTES, empty_pooled, is_plain_call

# Multiplications of a product; for fewer, the calls from Python take longer than the kernel saves.
MIN_PRODUCT = 1 << 24
# The same in a type that PyTorch multiplies without a library.
MIN_PRODUCT_WITHOUT_LIBRARY = 1 << 18


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b` of CPU tensors a [..., M, K] and b [..., K, N], with equal leading
    dimensions.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and a.dim() == 2 and _is_operator(_count_multiplications(a, b), a):
        return torch.ops.shardzoo.product(a, b, None)
    if not needs_gradient(a, b):
        return compute_matmul(a, b)
    largest = max(_count_elements(a, b.shape[-1]), a.numel(), b.numel())
    if _is_ours(largest, _count_multiplications(a, b), a, b):
        return _MatMul.apply(a, b)
    return a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `F.linear(x, weight, bias)` of CPU tensors x [..., C], weight [F, C] and bias [F] or
    None.
    """
    multiplications = x.numel() * weight.shape[0]
    compiling = torch.compiler.is_compiling()
    if compiling and _is_one_product(x, bias) and _is_operator(multiplications, x):
        rows = torch.ops.shardzoo.product(x.flatten(0, -2), weight.t(), bias)
        return rows.view(*x.shape[:-1], weight.shape[0])
    if not needs_gradient(x, weight, bias):
        return compute_linear(x, weight, bias)
    largest = max(_count_elements(x, weight.shape[0]), x.numel(), weight.numel())
    if _is_one_product(x, bias) and _is_ours(largest, multiplications, x, weight, bias):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


class _MatMul(Function):
    """Implements `matmul` of large tensors with gradients."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return compute_matmul(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        grad = grads[0]
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        grad_a = None
        grad_b = None
        if needs_b and b.stride(-2) == 1:
            # The gradient gets the layout of b, which is a transposed view.
            grad_b = compute_matmul(grad.mT, a).mT
        elif needs_b:
            grad_b = compute_matmul(a.mT, grad)
        if needs_a:
            grad_a = compute_matmul(grad, b.mT)
        return grad_a, grad_b


class _Linear(Function):
    """Implements `linear` of large tensors with gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return compute_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        grad = grads[0].flatten(0, -2)
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = compute_matmul(grad, weight).view(x.shape) if needs_x else None
        grad_weight = compute_matmul(grad.t(), x.flatten(0, -2)) if needs_weight else None
        grad_bias = grad.sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias


# Outside autograd.


def compute_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b` outside autograd."""
    if not _is_ours(_count_elements(a, b.shape[-1]), _count_multiplications(a, b), a, b):
        return a @ b
    size = (*a.shape[:-1], b.shape[-1])
    if a.dim() > 2 and not _has_library(a.dtype):
        # Copies in fp32 and their product are faster than PyTorch's loops in a type without a
        # library.
        product = compute_matmul(a.float(), b.float())
        return _empty_laid_out_as(b, a, *size).copy_(product)
    product = multiply(a, b, None)
    if product is not None:
        return product
    if a.dim() > 2 and a.itemsize < 4:
        # For 16-bit types, copying the matrices to be adjacent is faster than several products.
        result = empty_pooled(a, *size)
        torch.bmm(_flatten_batch(a), _flatten_batch(b), out=result.flatten(0, -3))
        return result
    result = _empty_laid_out_as(b, a, *size)
    _write_matmul(a, b, result)
    return result


def compute_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `F.linear(x, weight, bias)` outside autograd."""
    features = weight.shape[0]
    multiplications = x.numel() * features
    elements = _count_elements(x, features)
    if not _is_one_product(x, bias) or not _is_ours(elements, multiplications, x, weight, bias):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    product = multiply(rows, weight.t(), bias)
    if product is not None:
        return product.view(*x.shape[:-1], features)
    result = empty_pooled(x, *x.shape[:-1], features)
    out = result.flatten(0, -2)
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)
    return result


def _is_ours(elements: int, multiplications: int, first: Tensor, *others: Tensor | None) -> bool:
    """Returns whether this module computes a product: in memory of the pool, with our kernel, or
    both.
    """
    fills_pool = elements * first.itemsize >= MIN_POOLED_BYTES
    worthwhile = fills_pool or multiplications >= _min_product(first.dtype)
    # The kernel is asked for last, because a compiler cannot trace that.
    return (
        worthwhile
        and is_plain_call(first, *others)
        and (fills_pool or _suits_kernel(multiplications, first))
    )


def _is_one_product(x: Tensor, bias: Tensor | None) -> bool:
    """Returns whether `F.linear` adds the bias before rounding, as `addmm` does."""
    return x.dim() > 1 and (bias is None or x.is_contiguous())


def _count_elements(rows: Tensor, columns: int) -> int:
    return rows.shape[:-1].numel() * columns


def _count_multiplications(a: Tensor, b: Tensor) -> int:
    """Counts those of one product, or of a batch that we compute in fp32; 0 for PyTorch's other
    batches.
    """
    is_single = a.dim() == b.dim() == 2
    if is_single or not _has_library(a.dtype):
        return a.numel() * b.shape[-1]
    return 0


def _empty_laid_out_as(b: Tensor, like: Tensor, *size: int) -> Tensor:
    """Returns an empty [B, N, M, K], in the memory layout of b if b stores the N heads of each row
    side by side.
    """
    if len(size) == 4 and b.stride(-1) == 1 and b.stride(1) < b.stride(2):
        return empty_pooled(like, size[0], size[2], size[1], size[3]).transpose(1, 2)
    return empty_pooled(like, *size)


def _write_matmul(a: Tensor, b: Tensor, result: Tensor) -> None:
    if result.dim() == 2:
        torch.mm(a, b, out=result)
    elif result.dim() == 3:
        torch.bmm(a, b, out=result)
    elif all(tensor.stride(0) == tensor.shape[1] * tensor.stride(1) for tensor in (a, b, result)):
        _write_matmul(a.flatten(0, 1), b.flatten(0, 1), result.flatten(0, 1))
    else:
        # The matrices are not evenly spaced. Copying them to be so takes up to half as long as the
        # product.
        for parts in zip(a, b, result, strict=True):
            _write_matmul(*parts)


def _flatten_batch(tensor: Tensor) -> Tensor:
    """Flattens [..., M, N] to [B, M, N].

    A transposed view stays a view, where `reshape` would transpose in memory.
    """
    if tensor.stride(-2) == 1:
        return tensor.mT.flatten(0, -3).mT
    return tensor.flatten(0, -3)


# The kernel.


@functools.cache
def _types_without_library() -> tuple[torch.dtype, ...]:
    """Returns the types that PyTorch multiplies by its own loops here, which are up to 100 times
    slower.
    """
    checks = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    if not torch.backends.mkldnn.is_available():
        return tuple(checks)
    return tuple(dtype for dtype, check in checks.items() if not getattr(torch.ops.mkldnn, check)())


@assume_constant_result
def _has_library(dtype: torch.dtype) -> bool:
    return dtype not in _types_without_library()


@functools.cache
def _kernel_dtypes() -> tuple[torch.dtype, ...]:
    """Returns the types in which our kernel is faster on this processor than PyTorch."""
    candidates = (torch.float32, torch.bfloat16, torch.float16)
    if library.is_amd_with_avx512_bf16():
        return candidates
    return tuple(dtype for dtype in candidates if not _has_library(dtype))


def _min_product(dtype: torch.dtype) -> int:
    return MIN_PRODUCT if _has_library(dtype) else MIN_PRODUCT_WITHOUT_LIBRARY


def _suits_kernel(multiplications: int, a: Tensor) -> bool:
    worthwhile = multiplications >= _min_product(a.dtype) and a.dtype in _kernel_dtypes()
    return worthwhile and variants.choose_variant("cpu") == "cpp"


def multiply(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns `a @ b + bias` outside autograd, or None if our kernel cannot or should not compute
    it.
    """
    if not _suits_kernel(_count_multiplications(a, b), a):
        return None
    for counter in flop_counters():
        counter.flop_registry.setdefault(torch.ops.shardzoo_kernels.matrix_product, _count_flops)
    return library.call_compiled("matrix_product", a, b, bias)


def multiply_groups(
    x: Tensor, weight: Tensor, counts: list[int], transposed: bool, out: Tensor
) -> bool:
    """Multiplies each group of rows by its own matrix outside autograd, if our kernel should.

    Args:
        x: [M, C], of which the groups have `counts` rows each, one after the other.
        weight: One matrix for each group, [G, C, F], or transposed [G, F, C].
        out: [M, F], which the products are written to, but for the rows behind those of the groups.

    Returns:
        Whether it did.
    """
    rows = sum(counts)
    if not _suits_groups(x, weight, rows):
        return False
    for counter in flop_counters():
        operator = torch.ops.shardzoo_kernels.grouped_product
        counter.flop_registry.setdefault(operator, _count_group_flops)
    tensors = (x.contiguous(), weight.contiguous())
    library.call_compiled("grouped_product", *tensors, counts, transposed, out)
    return True


def multiply_groups_outer(x: Tensor, y: Tensor, counts: list[int], out: Tensor) -> bool:
    """Multiplies the transposed rows of each group with its other rows outside autograd, if our
    kernel should.

    Args:
        x: [M, C], of which the groups have `counts` rows each, one after the other.
        y: [M, F].
        out: [G, C, F], which the products are written to.

    Returns:
        Whether it did.
    """
    if not _suits_groups(x, out, sum(counts)):
        return False
    for counter in flop_counters():
        operator = torch.ops.shardzoo_kernels.grouped_outer_product
        counter.flop_registry.setdefault(operator, _count_outer_flops)
    library.call_compiled("grouped_outer_product", x.contiguous(), y.contiguous(), counts, out)
    return True


def _suits_groups(x: Tensor, matrices: Tensor, rows: int) -> bool:
    """Returns whether our kernel computes products with matrices [G, ...] of `rows` rows together.

    Groups of few rows are PyTorch's.
    """
    multiplications = rows * matrices[:1].numel()
    return (
        multiplications >= _min_product(x.dtype) * len(matrices)
        and is_plain_call(x, matrices)
        and _suits_kernel(multiplications, x)
    )


def _count_group_flops(
    x: Tensor, weight: Tensor, counts: list[int], *_: object, out_val: object
) -> int:
    return 2 * sum(counts) * weight[:1].numel()


def _count_outer_flops(x: Tensor, y: Tensor, counts: list[int], *_: object, out_val: object) -> int:
    return 2 * sum(counts) * x.shape[1] * y.shape[1]


def _count_flops(a: Tensor, b: Tensor, *_: object, out_val: Tensor | None) -> int:
    return 0 if out_val is None else 2 * a.numel() * b.shape[1]


# Compiled code cannot trace how a product is computed, so a large product is an operator of its
# graph.


def _is_operator(multiplications: int, a: Tensor) -> bool:
    return (
        multiplications >= _min_product(a.dtype)
        and a.is_floating_point()
        and not torch.is_autocast_enabled("cpu")
    )


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    product = multiply(a, b, bias)
    if product is not None:
        return product
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _allocate_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _save_factors(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])


def _product_backward(ctx, grad: Tensor):
    a, b = ctx.saved_tensors
    needs_a, needs_b, needs_bias = ctx.needs_input_grad
    product = torch.ops.shardzoo.product
    grad_a = product(grad, b.mT, None) if needs_a else None
    grad_b = None
    if needs_b and b.stride(0) == 1:
        # The gradient gets the layout of b, which is a transposed view.
        grad_b = product(grad.mT, a, None).mT
    elif needs_b:
        grad_b = product(a.mT, grad, None)
    return grad_a, grad_b, grad.sum(0) if needs_bias else None


registration.LIBRARY.define("product(Tensor a, Tensor b, Tensor? bias) -> Tensor")
registration.LIBRARY.impl("product", _product, "CPU")
torch.library.register_fake("shardzoo::product", _allocate_product, lib=registration.LIBRARY)
torch.library.register_autograd(
    "shardzoo::product", _product_backward, setup_context=_save_factors, lib=registration.LIBRARY
)
