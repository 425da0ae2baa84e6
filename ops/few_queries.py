"""Attention of a decoding step on a CPU, by the kernel of csrc/cpu/few_queries.h.

A step calls it once or twice a layer, and the kernel takes as long as a few of Python's calls. So this checks only what
decides whether the kernel can and should run; the caller's shapes are those of `attention`.
"""

from __future__ import annotations

from torch import Tensor

from . import library
from .attention import WIDEST_HEAD
from .library import flop_counters, may_decode

MIN_FEW_KEYS = 1 << 18  # numbers of all keys in fp32; for fewer, `scaled_dot_product_attention` is as fast


def few_queries_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, prefix: Tensor | None, *, scale: float
) -> Tensor | None:
    """Returns what `attention` does, or None if that or `scaled_dot_product_attention` should compute it.

    In bf16 the kernel takes a seventh of the time of `scaled_dot_product_attention` for 8 × 12 heads of 64 and 64 keys,
    in fp32 0.8 of it.

    Args:
        mask: Broadcastable to [B, N, Sq, Sk]. The other arguments are those of `attention`.
    """
    if not (
        prefix is None
        and (q.itemsize == 2 or k.numel() >= MIN_FEW_KEYS)
        and q.shape[3] <= WIDEST_HEAD
        and may_decode(q, k, v)
        and not flop_counters()
    ):
        return None
    return library.call_compiled("attention_of_few_queries", q, k, v, mask, scale, causal)
