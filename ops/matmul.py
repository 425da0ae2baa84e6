"""Computes matrix products. An accelerator uses PyTorch's own products; three things make them faster on a CPU.

1. Large results reuse the memory of freed results (csrc/matmul/pool.h). New memory from the system causes page faults
   when it is first written, which can take longer than the product itself: attention scores are large compared with
   their arithmetic.
2. Large products use our kernel (csrc/matmul/) where PyTorch has no library for a 16-bit type, as on processors without
   AVX-512, and on AMD processors with AVX512-BF16, where its libraries run AVX2 in fp32 and are
   slower for many shapes in bf16. Each sum is computed in fp32 in an order that depends only on its length, and rounded
   once. Compiled code calls them as an operator.
3. A linear layer of few rows, as in a decoding step, takes as long as reading the weight once. BLAS is tuned for many
   rows; our kernel reads the weight in its memory order, once for all rows, and multiplies pairs of bf16 where the
   processor can. Every sum is computed in fp32 (fp64 for fp64) in an order that does not depend on the number of rows
   or threads, and rounded once. The kernel has no gradient formula and runs only in inference mode.

The reference of each function is the PyTorch function in its docstring.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import library
from .library import (
    POOLED,
    can_bypass_dispatcher,
    empty_pooled,
    flop_counters,
    in_inference_mode,
    needs_gradient,
)

MIN_PRODUCT = (
    1 << 24
)  # multiplications; for fewer, the calls from Python take longer than the kernel saves
MIN_PRODUCT_WITHOUT_LIBRARY = (
    1 << 18
)  # the same in a type that PyTorch multiplies without a library
# The most rows of a linear layer for our kernel; with more, BLAS is as fast or faster.
MAX_GEMV_ROWS = {torch.float32: 32, torch.float64: 8, torch.bfloat16: 8, torch.float16: 8}
MAX_GEMV_ROWS_BF16 = (
    16  # with AVX512-BF16, where our kernel multiplies as BLAS does; not with AMX, which BLAS uses
)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b` of a [..., M, K] and b [..., K, N], with equal leading dimensions.

    A large product on a CPU can be differentiated only once.
    """
    if not a.is_cpu:
        return a @ b
    if torch.compiler.is_compiling() and a.dim() == 2 and _is_operator(_multiplications(a, b), a):
        return torch.ops.shardzoo.product(a, b, None)
    if not needs_gradient(a, b):
        return _cpu_matmul(a, b)
    largest = max(_elements(a, b.shape[-1]), a.numel(), b.numel())
    return _MatMul.apply(a, b) if _is_ours(largest, _multiplications(a, b), a, b) else a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `F.linear(x, weight, bias)`, [..., F] in the dtype of x, of x [..., C], weight [F, C] and bias [F].

    A large product on a CPU can be differentiated only once.
    """
    if not x.is_cpu:
        return F.linear(x, weight, bias)
    if (
        torch.compiler.is_compiling()
        and _is_one_product(x, bias)
        and _is_operator(x.numel() * weight.shape[0], x)
    ):
        rows = torch.ops.shardzoo.product(x.flatten(0, -2), weight.t(), bias)
        return rows.view(*x.shape[:-1], weight.shape[0])
    if in_inference_mode() and (y := _few_rows(x, weight, bias)) is not None:
        return y
    if not needs_gradient(x, weight, bias):
        return _cpu_linear(x, weight, bias)
    largest = max(_elements(x, weight.shape[0]), x.numel(), weight.numel())
    ours = _is_one_product(x, bias) and _is_ours(
        largest, x.numel() * weight.shape[0], x, weight, bias
    )
    return _Linear.apply(x, weight, bias) if ours else F.linear(x, weight, bias)


def addmm(bias: Tensor | None, x: Tensor, weight_t: Tensor) -> Tensor:
    """Returns `bias + x @ weight_t` outside autograd, of bias [F] or None, x [..., C] and weight_t [C, F].

    Unlike `linear`, it never uses the kernel for few rows, so the bits do not depend on inference mode.
    """
    return _cpu_linear(x, weight_t.t(), bias) if x.is_cpu else F.linear(x, weight_t.t(), bias)


def autocast_arguments(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts the arguments of a linear layer like `torch.autocast`, which does not do this for a custom function."""
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


class _MatMul(Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _cpu_matmul(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        (grad,), (a, b) = grads, ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        grad_b = None
        if needs_b:  # in the layout of b
            grad_b = _cpu_matmul(grad.mT, a).mT if b.stride(-2) == 1 else _cpu_matmul(a.mT, grad)
        return _cpu_matmul(grad, b.mT) if needs_a else None, grad_b


class _Linear(Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _cpu_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        grad, (x, weight) = grads[0].flatten(0, -2), ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _cpu_matmul(grad, weight).view(x.shape) if needs_x else None,
            _cpu_matmul(grad.t(), x.flatten(0, -2)) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


# Compiled code, which cannot trace how a product is computed: a large one is an operator, which chooses when it runs.


def _is_operator(multiplications: int, a: Tensor) -> bool:
    return (
        multiplications >= _min_product(a.dtype)
        and a.is_floating_point()
        and not torch.is_autocast_enabled("cpu")
    )


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if (product := _multiply(a, b, bias)) is not None:
        return product
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _keep_factors(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])


def _product_backward(ctx, grad: Tensor):
    (a, b), (needs_a, needs_b, needs_bias) = ctx.saved_tensors, ctx.needs_input_grad
    product, grad_b = torch.ops.shardzoo.product, None
    grad_a = product(grad, b.mT, None) if needs_a else None
    if needs_b:  # in the layout of b
        grad_b = product(grad.mT, a, None).mT if b.stride(0) == 1 else product(a.mT, grad, None)
    return grad_a, grad_b, grad.sum(0) if needs_bias else None


def _allocate_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


library.LIBRARY.define("product(Tensor a, Tensor b, Tensor? bias) -> Tensor")
library.LIBRARY.impl("product", _product, "CPU")
torch.library.register_fake("shardzoo::product", _allocate_product, lib=library.LIBRARY)
torch.library.register_autograd(
    "shardzoo::product", _product_backward, setup_context=_keep_factors, lib=library.LIBRARY
)


# The pool.


def fits_pool(elements: int, first: Tensor, *others: Tensor | None) -> bool:
    """Returns whether a result of `elements` elements, computed from these tensors, should use memory of the pool."""
    return elements * first.itemsize >= POOLED and _is_plain_call(first, *others)


def _is_plain_call(first: Tensor, *others: Tensor | None) -> bool:
    """Returns whether a call has real, dense CPU tensors of one dtype, and nothing traces, transforms, casts or
    differentiates it in forward mode."""
    return (
        first.is_cpu
        and first.is_floating_point()
        and all(other is None or other.dtype == first.dtype for other in others)
        and all(tensor is None or tensor.layout is torch.strided for tensor in (first, *others))
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and can_bypass_dispatcher(first, *others)
    )


def _is_ours(elements: int, multiplications: int, first: Tensor, *others: Tensor | None) -> bool:
    """Returns whether this module computes a product: in memory of the pool, with our kernel, or both."""
    fills_pool = elements * first.itemsize >= POOLED
    worthwhile = fills_pool or multiplications >= _min_product(first.dtype)
    # The kernel is asked for last, because a compiler cannot trace that.
    return (
        worthwhile
        and _is_plain_call(first, *others)
        and (fills_pool or _suits_kernel(multiplications, first))
    )


def _cpu_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b outside autograd."""
    if not _is_ours(_elements(a, b.shape[-1]), _multiplications(a, b), a, b):
        return a @ b
    size = (*a.shape[:-1], b.shape[-1])
    if a.dim() > 2 and not _has_library(a.dtype):  # copies in fp32 are faster than PyTorch's loops
        return _empty_laid_out_as(b, a, *size).copy_(_cpu_matmul(a.float(), b.float()))
    if (product := _multiply(a, b, None)) is not None:
        return product
    if a.dim() > 2 and a.itemsize < 4:  # for 16-bit types, a copy is faster than several products
        result = empty_pooled(a, *size)
        torch.bmm(_matrices(a), _matrices(b), out=result.flatten(0, -3))
    else:
        result = _empty_laid_out_as(b, a, *size)
        _write_matmul(a, b, result)
    return result


def _cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `F.linear` outside autograd."""
    features = weight.shape[0]
    if not (
        _is_one_product(x, bias)
        and _is_ours(_elements(x, features), x.numel() * features, x, weight, bias)
    ):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    if (product := _multiply(rows, weight.t(), bias)) is not None:
        return product.view(*x.shape[:-1], features)
    result = empty_pooled(x, *x.shape[:-1], features)
    out = result.flatten(0, -2)
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)
    return result


def _is_one_product(x: Tensor, bias: Tensor | None) -> bool:
    """Returns whether `F.linear` adds the bias before rounding, as `addmm` does."""
    return x.dim() > 1 and (bias is None or x.is_contiguous())


def _elements(rows: Tensor, columns: int) -> int:
    return rows.shape[:-1].numel() * columns


def _multiplications(a: Tensor, b: Tensor) -> int:
    """Returns those of one product, or of a batch that we compute in fp32; 0 for PyTorch's other batches."""
    return a.numel() * b.shape[-1] if a.dim() == b.dim() == 2 or not _has_library(a.dtype) else 0


def _empty_laid_out_as(b: Tensor, like: Tensor, *size: int) -> Tensor:
    """Returns an empty [B, N, M, K], in the memory layout of b if b stores the N heads of each row side by side."""
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
    else:  # the matrices are not evenly spaced; copying them to be so takes up to half as long as the product
        for parts in zip(a, b, result, strict=True):
            _write_matmul(*parts)


def _matrices(tensor: Tensor) -> Tensor:
    """Flattens [..., M, N] to [B, M, N]. A transposed view stays a view, where `reshape` would transpose in memory."""
    return tensor.mT.flatten(0, -3).mT if tensor.stride(-2) == 1 else tensor.flatten(0, -3)


# The kernel for large products.


@functools.cache
def _types_without_library() -> tuple[torch.dtype, ...]:
    """Returns the types that PyTorch multiplies by its own loops here, which are up to 100 times slower."""
    checks = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    available = torch.backends.mkldnn.is_available()
    return tuple(
        t for t, check in checks.items() if not (available and getattr(torch.ops.mkldnn, check)())
    )


@cast(Any, torch.compiler).assume_constant_result
def _has_library(dtype: torch.dtype) -> bool:
    return dtype not in _types_without_library()


@functools.cache
def _kernel_dtypes() -> tuple[torch.dtype, ...]:
    """Returns the types in which our kernel is faster on this processor than PyTorch."""
    always = library.is_amd_with_avx512_bf16()
    return tuple(
        t for t in (torch.float32, torch.bfloat16, torch.float16) if always or not _has_library(t)
    )


def _min_product(dtype: torch.dtype) -> int:
    return MIN_PRODUCT if _has_library(dtype) else MIN_PRODUCT_WITHOUT_LIBRARY


def _suits_kernel(multiplications: int, a: Tensor) -> bool:
    worthwhile = multiplications >= _min_product(a.dtype) and a.dtype in _kernel_dtypes()
    return worthwhile and library.choose_variant("cpu") == "cpp"


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns `a @ b + bias` outside autograd, or None if our kernel cannot or should not compute it."""
    if not _suits_kernel(_multiplications(a, b), a):
        return None
    for counter in flop_counters():
        counter.flop_registry.setdefault(torch.ops.shardzoo_kernels.matrix_product, _product_flops)
    return library.call_compiled("matrix_product", a, b, bias)


def _product_flops(a: Tensor, b: Tensor, *_: object, out_val: Tensor | None) -> int:
    return 0 if out_val is None else 2 * a.numel() * b.shape[1]


# Few rows.


@functools.cache
def _max_gemv_rows(dtype: torch.dtype) -> int:
    if (
        dtype == torch.bfloat16
        and library.load_error() is None
        and library.cpu_isa() == "x86-64-v4+bf16"
    ):
        return MAX_GEMV_ROWS_BF16
    return MAX_GEMV_ROWS.get(dtype, 0)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns `F.linear`, or None if the kernel for few rows cannot or should not compute it."""
    may = library.may_decode(x, weight, bias) and weight.layout is torch.strided
    most_rows = _max_gemv_rows(x.dtype) if may else 0
    return (
        library.call_compiled("linear_of_few_rows", x, weight, bias, most_rows)
        if most_rows
        else None
    )
