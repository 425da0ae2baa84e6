"""Computes which elements dropout keeps, as a function of counters, so that a mask is never stored.

Whether an element is kept is an integer function of the seed, the site (which dropout of the
model), the visit (which use of the site), the global sample index, and the element's row and column
in the sample's unsplit tensor. In attention probabilities the row is head * 2^32 + query and the
column is the key. All arithmetic is on unsigned integers modulo 2^64 or 2^32, so PyTorch, C++, CUDA
and Triton compute identical bits:

    mix64(z): z ^= z >> 30; z *= 0xbf58476d1ce4e5b9; z ^= z >> 27; z *= 0x94d049bb133111eb; z ^= z >> 31
    chain(key, value) = mix64(key + 0x9e3779b97f4a7c15 * (value + 1))
    key of a use = chain(chain(mix64(seed), site), visit);  key of a sample = chain(key of the use, sample)
    key of a row = chain(key of the sample, row);  low, high = its halves
    h = low + column;  h ^= h >> 16;  h *= 0x21f0aaad;  h ^= high;  h ^= h >> 15;  h *= 0x735a2d97;  h ^= h >> 15
    kept = h >= round(p * 2^32)

mix64 is the finalizer of SplitMix64 (Steele et al. 2014); the 32-bit constants are Wellons'
low-bias constants.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from .device import pins_host_memory, records_graph

_LOW = 0xFFFFFFFF

_GOLDEN = 0x9E3779B97F4A7C15

_MASK64 = (1 << 64) - 1


def use_key(seed: int, site: int, visit: int) -> int:
    """Returns the 64-bit key of the use `visit` of a dropout: chain(chain(mix64(seed), site),
    visit).
    """
    key = _mix64(seed & _MASK64)
    for value in (site, visit):
        key = _mix64((key + _GOLDEN * (value + 1)) & _MASK64)
    return key


def dropout_keys(
    key: int | list[int] | Tensor,
    first_sample: int | Tensor,
    batch: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Returns one key per sample, chain(key, first_sample + b): int64 [batch], or [uses, batch] for
    several keys.

    Args:
        key: The 64-bit key of one use, or those of several, also as `send_use_keys` returns them.
        first_sample: The number of the first sample in the run, or that number on the device, int64
            [].
        batch: The number of samples.
    """
    if isinstance(first_sample, Tensor):
        samples = torch.arange(batch, device=device) + first_sample
    else:
        samples = torch.arange(first_sample, first_sample + batch, device=device)
    if isinstance(key, int):
        return _chain(torch.full_like(samples, _signed(key)), samples)
    if isinstance(key, list):
        key = send_use_keys(key, device)
    return _chain(key[:, None], samples)


def send_use_keys(keys: list[int], device: torch.device | str) -> Tensor:
    """Returns the 64-bit keys of several uses on a device, as signed numbers: int64 [uses].

    The host does not wait for the device.
    """
    pinned = pins_host_memory(torch.device(device))
    signed = [_signed(key) for key in keys]
    on_host = torch.tensor(signed, dtype=torch.int64, device="cpu", pin_memory=pinned)
    return on_host.to(device, non_blocking=pinned)


def dropout_keep(
    keys: Tensor, shape: tuple[int, ...], p: float, first_row: int = 0, first_column: int = 0
) -> Tensor:
    """Returns the boolean mask of kept elements for a tensor [B, ..., C].

    Args:
        keys: int64 [B] from `dropout_keys`.
        shape: The tensor's shape. The dimensions between the first and the last are the rows of a
            sample.
        p: The probability of dropping an element.
        first_row: Where the tensor begins within the sample's unsplit tensor. A rank with positions
            [s0, s0 + Sp) of [S, F] has first_row = s0.
        first_column: The same for columns: a rank with columns [f0, f0 + Fp) of [S, F] has
            first_column = f0.
    """
    rows = torch.arange(first_row, first_row + prod(shape[1:-1]), device=keys.device)
    return kept_elements(row_keys(keys, rows), shape[-1], p, first_column).reshape(shape)


def kept_elements(keys: Tensor, columns: int, p: float, first_column: int = 0) -> Tensor:
    """Returns the boolean mask [B, R, columns] of kept elements in rows with the keys int64 [B, R]."""
    column = torch.arange(first_column, first_column + columns, device=keys.device)
    h = ((keys[:, :, None] & _LOW) + column) & _LOW
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & _LOW
    h = h ^ _shift_right(keys[:, :, None], 32)
    h = ((h ^ (h >> 15)) * 0x735A2D97) & _LOW
    h = h ^ (h >> 15)
    return h >= dropout_threshold(p)


def dropout_threshold(p: float) -> int:
    """Returns the 32-bit hash below which elements are dropped.

    Raises:
        ValueError: p is outside [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"a dropout probability must be at least 0 and less than 1, got {p}")
    return min(round(p * 2**32), _LOW)


def row_keys(keys: Tensor, rows: Tensor) -> Tensor:
    """Returns the keys of the rows int64 [R] of each sample, int64 [B, R]."""
    return _chain(keys.reshape(-1, 1), rows)


def keys_from_row(keys: Tensor, first_row: int | Tensor) -> Tensor:
    """Returns keys with which row r has the mask that row first_row + r has with `keys`.

    The key of a row depends on the sum of the sample's key and a multiple of the row.
    """
    if records_graph() and not isinstance(first_row, Tensor):
        # A compiler does not know how large the number is, and its own are too small for the product.
        first_row = torch.full_like(keys, first_row)
    if isinstance(first_row, Tensor):
        return keys + first_row * _signed(_GOLDEN)
    return keys + _signed(_GOLDEN * first_row)


def attention_rows(first_head: int, heads: int, queries: int, device: torch.device | str) -> Tensor:
    """Returns the row of each (head, query) in attention probabilities, int64 [heads * queries].

    It is head * 2^32 + query, so that the mask of a head does not depend on the number of queries,
    which padding changes.
    """
    numbers = torch.arange(first_head, first_head + heads, device=device)
    return ((numbers << 32)[:, None] + torch.arange(queries, device=device)).flatten()


# The hash on PyTorch's and Python's integers.


def _chain(key: Tensor, value: Tensor) -> Tensor:
    """Returns chain(key, value) of int64 tensors that broadcast."""
    z = key + (value + 1) * _signed(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _mix64(z: int) -> int:
    """Returns mix64 of an integer below 2^64."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shifts int64 as if it were unsigned: zeros come in, not the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Returns the signed integer with the bits of `value` modulo 2^64, because PyTorch has no
    unsigned arithmetic.
    """
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value
