"""y = x Wᵀ + bias for the few rows of a decoding step, whose time is that of reading the weight once.

BLAS libraries are tuned for many rows; with few, on a CPU, they reach a part of the memory's bandwidth. The kernel here
reads the weight as it lies, once for all rows. Every sum is taken in fp32 (fp64 for fp64) in an order that depends
neither on the number of rows nor on the number of threads, and rounded once.

It has no gradient formula and runs in inference mode only. Elsewhere, and for more rows, `linear` is PyTorch's product.
"""

from __future__ import annotations

import torch

from . import dispatch, native
from .inference import in_inference_mode
from .library import can_bypass_dispatcher
from .product import linear_product

# With more rows BLAS is as fast or faster; for 16 bits it has instructions that are not used here.
MOST_ROWS = {torch.float32: 32, torch.float64: 8, torch.bfloat16: 8, torch.float16: 8}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + bias: x [..., C], weight [F, C], bias [F]; returns [..., F] in x's dtype, as `F.linear` does."""
    if not fits(x, weight, bias):
        return linear_product(x, weight, bias)
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    native.call("linear", x.contiguous(), weight, bias, y)
    return y


def fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernel can, and should, do this product."""
    columns = x.shape[-1] if x.dim() else 0
    return (
        in_inference_mode()
        and x.is_cpu
        and 0 < x.numel() <= MOST_ROWS.get(x.dtype, 0) * columns
        and weight.dim() == 2
        and weight.shape[1] == columns
        and weight.is_contiguous()
        and x.dtype == weight.dtype
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and can_bypass_dispatcher(x, weight, bias)
        and not torch.is_autocast_enabled("cpu")
        and dispatch.choose("cpu") == "cpp"
    )
