"""Helpers of the Triton kernels.

Names that end in `_ptr` are pointers; capitals are compile-time constants.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up, in fewer calls than `triton.cdiv`."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least n >= 1.

    Triton's own function takes as long as a launch: it is one that kernels may call as well.
    """
    return 1 << (n - 1).bit_length()


def choose_block(columns: int) -> int:
    """Returns the smallest power of two that holds a row."""
    return next_power_of_2(columns)


def choose_warps(block: int) -> int:
    """Returns the number of warps for a row of this size."""
    return min(max(block // 512, 1), 16)


def chunk_rows(rows: int) -> int:
    """Returns the rows per chunk for column sums.

    They depend only on the shape, so that results are reproducible.
    """
    return max(32, -(-rows // 512))


def partial_sums(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Returns an uninitialized fp32 tensor [chunks, columns]."""
    return like.new_empty(-(-rows // chunk_rows(rows)), columns, dtype=torch.float32)


def pointer(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Returns `tensor`, or `like` as a stand-in for None, which a flag tells the kernel not to use."""
    return like if tensor is None else tensor


@triton.jit
def row_key(sample_key, row):
    """Returns the dropout key of a row, chain(sample_key, row) of ops/dropout_mask.py; both are
    int64.
    """
    z = sample_key.to(tl.uint64) + (row + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def mixed_key(key):
    """Returns a row's key as `is_kept_by` takes it, whose upper half has gone through a step of the hash."""
    key = key.to(tl.uint64)
    return key ^ ((key >> 47) << 32)


@triton.jit
def is_kept_by(mixed, column, threshold):
    """Returns whether the dropout hash keeps the element. `mixed` is the row's `mixed_key`.

    It is the hash of ops/dropout_mask.py in nine instructions instead of eleven. h ^= high; h ^= h >> 15 is
    h ^ (h >> 15) ^ (high ^ (high >> 15)), whose last term is the row's. And h ^ (h >> 15) >= threshold is decided by
    the highest bit in which h differs from the number whose result is the threshold. Above that bit both are equal,
    so that this number, shifted by 15, serves for h >> 15.
    """
    h = mixed.to(tl.uint32) + column.to(tl.uint32)
    h = h ^ (h >> 16)
    h = h * 0x21F0AAAD
    h = h ^ (h >> 15) ^ (mixed >> 32).to(tl.uint32)
    h = h * 0x735A2D97
    threshold = tl.full((), threshold, tl.uint32)
    return h ^ ((threshold >> 15) ^ (threshold >> 30)) >= threshold


@triton.jit
def is_kept(key, column, threshold):
    """Returns whether the dropout hash keeps the element. `key` is the row's key."""
    return is_kept_by(mixed_key(key), column, threshold)


@triton.jit
def keep_factor(key, column, threshold, keep_scale):
    """Returns keep_scale where the dropout hash keeps the element, else 0.

    `key` is the row's key.
    """
    return tl.where(is_kept(key, column, threshold), keep_scale, 0.0)
