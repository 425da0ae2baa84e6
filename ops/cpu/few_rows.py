"""Computes what a decoding step needs, for few rows or queries, each as one call into C++
(csrc/matmul/few_rows.h).

A decoding step of one row calls a hundred operators that run for microseconds, so the time of
Python counts. These kernels have no gradient formula and run only in inference mode. Each function
returns None where its kernel cannot or should not compute the call; the caller then goes on with
the general operators.

A linear layer of few rows takes as long as reading the weight once. BLAS is tuned for many rows;
our kernel reads the weight in its memory order, once for all rows, and multiplies pairs of bf16
where the processor can. Every sum is computed in fp32 (fp64 for fp64) in an order that does not
depend on the number of rows or threads, and rounded once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import library, variants
from ..dispatcher import can_bypass_dispatcher, flop_counters, in_inference_mode

# The most rows of a linear layer for our kernel; with more, BLAS is as fast or faster.
MAX_GEMV_ROWS = {torch.float32: 32, torch.float64: 8, torch.bfloat16: 8, torch.float16: 8}
# With AVX512-BF16 our kernel multiplies as BLAS does. This does not hold with AMX, which BLAS uses.
MAX_GEMV_ROWS_BF16 = 16
# Elements of all keys from which the kernel of few queries is faster in fp32.
MIN_FEW_KEYS = 1 << 18
# The widest head that the attention kernels take.
WIDEST_HEAD = 256


def may_decode(first: Tensor, *others: Tensor | None) -> bool:
    """Returns whether the operators of a decoding step may compute a call with these tensors."""
    is_eager = in_inference_mode() and first.is_cpu and not torch.is_autocast_enabled("cpu")
    return (
        is_eager
        and can_bypass_dispatcher(first, *others)
        and variants.choose_variant("cpu") == "cpp"
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns `F.linear(x, weight, bias)` of few rows, or None."""
    if not may_decode(x, weight, bias) or weight.layout is not torch.strided:
        return None
    most_rows = max_gemv_rows(x.dtype)
    if not most_rows:
        return None
    return library.call_compiled("linear_of_few_rows", x, weight, bias, most_rows)


@functools.cache
def max_gemv_rows(dtype: torch.dtype) -> int:
    """Returns the most rows that our kernel multiplies faster than BLAS on this processor; 0 for
    none.
    """
    has_bf16 = library.load_error() is None and library.cpu_isa() == "x86-64-v4+bf16"
    if dtype == torch.bfloat16 and has_bf16:
        return MAX_GEMV_ROWS_BF16
    return MAX_GEMV_ROWS.get(dtype, 0)


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns (norm of h, h) with h = x + residual, in the shapes of `add_layer_norm`; (None, None)
    for None.

    Args:
        centered: Whether this is LayerNorm, which subtracts the mean, instead of RMSNorm.
    """
    if not may_decode(x, residual, weight, bias):
        return None, None
    return library.call_compiled("norm_of_few_rows", x, residual, weight, bias, eps, centered)


def few_queries_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    prefix: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor | None:
    """Returns what `ops.attention` does, of few queries, or None.

    The kernel takes as long as a few of Python's calls: for 8 × 12 heads of 64 and 64 keys a
    seventh of the time of `scaled_dot_product_attention` in bf16, in fp32 0.8 of it.

    Args:
        mask: Broadcastable to [B, N, Sq, Sk]. The other arguments are those of `ops.attention`.
    """
    is_faster = q.itemsize == 2 or k.numel() >= MIN_FEW_KEYS
    is_supported = prefix is None and q.shape[3] <= WIDEST_HEAD
    if not is_faster or not is_supported or not may_decode(q, k, v) or flop_counters():
        return None
    return library.call_compiled(
        "attention_of_few_queries", q, k, v, mask, scale, causal, softcap or 0.0
    )
