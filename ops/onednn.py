"""Large fp32 products by oneDNN, where it is quicker than the library that PyTorch takes: MKL runs AVX2 on AMD's
processors that have AVX-512 (Zen 4: 150 against 195 GFLOP/s on two cores)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import native
from .library import flop_counters

LEAST = 1 << 27  # multiplications, under which preparing oneDNN for new sizes would take what it saves


@functools.cache
def is_quicker() -> bool:
    """Whether oneDNN is there, and quicker than MKL on this processor."""
    return native.is_amd_with_avx512() and torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()


def suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `F.linear` of these is to be oneDNN's, which reads a bias as if it were dense, and knows no matrix whose
    rows overlap."""
    return (
        x.numel() * weight.shape[0] >= LEAST
        and x.dtype == torch.float32
        and x.is_contiguous()
        and (_has_dense_rows(weight) or _has_dense_rows(weight.t()))
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and is_quicker()
    )


def _has_dense_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` without a gradient; the weight may be a transposed view."""
    for counter in flop_counters():
        counter.flop_registry.setdefault(torch.ops.mkldnn._linear_pointwise, _flops)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _flops(x: Tensor, weight: Tensor, *_: object, **__: object) -> int:
    return 2 * x.numel() * weight.shape[0]
