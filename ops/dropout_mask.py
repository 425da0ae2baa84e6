"""Counter-based dropout: whether an element is kept is a pure integer function of where it is.

The mask depends on seed, site (which dropout of the model), visit (which use of the site), global sample index,
the element's row and column in the sample's unsplit tensor, and on nothing else. All arithmetic is
on unsigned integers modulo 2^64 or 2^32, so PyTorch, C++, CUDA and Triton evaluate it to identical bits:

    mix64(z): z ^= z >> 30; z *= 0xbf58476d1ce4e5b9; z ^= z >> 27; z *= 0x94d049bb133111eb; z ^= z >> 31
    chain(key, value) = mix64(key + 0x9e3779b97f4a7c15 * (value + 1))
    key of a use = chain(chain(mix64(seed), site), visit);  sample's key = chain(key of the use, sample)
    row key = chain(sample's key, row);  low, high = its halves
    h = low + column;  h ^= h >> 16;  h *= 0x21f0aaad;  h ^= high;  h ^= h >> 15;  h *= 0x735a2d97;  h ^= h >>
    15 kept = h >= round(p * 2^32)

mix64 is the finalizer of SplitMix64 (Steele et al. 2014); the 32-bit constants are Wellons' low-bias ones.
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """The signed 64-bit integer with the same bits as `value` modulo 2^64: torch has no unsigned arithmetic."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _chain(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    z = key + (value + 1) * _signed(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def use_key(seed: int, site: int, visit: int) -> int:
    """The 64-bit key of the use `visit` of a dropout: chain(chain(mix64(seed), site), visit)."""
    key = _mix64(seed & _MASK64)
    for value in (site, visit):
        key = _mix64((key + _GOLDEN * (value + 1)) & _MASK64)
    return key


def dropout_keys(key: int, first_sample: int, batch: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [batch], a key per sample: chain(key, first_sample + b), from the 64-bit key of one use of a
    site.
    """
    samples = torch.arange(first_sample, first_sample + batch, device=device)
    return _chain(torch.full_like(samples, _signed(key)), samples)


def row_keys(keys: torch.Tensor, first_row: int, rows: int) -> torch.Tensor:
    """int64 [B, rows], the keys of rows first_row, first_row + 1, ... of each sample."""
    return _chain(keys.reshape(-1, 1), torch.arange(first_row, first_row + rows, device=keys.device))


def dropout_threshold(p: float) -> int:
    """Elements whose 32-bit hash is below this are dropped. Raises ValueError unless 0 <= p < 1."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"a dropout probability must be at least 0 and less than 1, got {p}")
    return min(round(p * 2**32), _LOW)


def dropout_keep(
    keys: torch.Tensor, shape: tuple[int, ...], p: float, first_row: int = 0, first_column: int = 0
) -> torch.Tensor:
    """Boolean mask of kept elements for a tensor [B, ..., C].

    Args:
        keys: int64 [B] of `dropout_keys`.
        shape: the tensor's shape. Its dimensions between the first and the last are the rows of a sample.
        p: probability of dropping an element.
        first_row, first_column: where the tensor begins within the sample's unsplit tensor. A rank with heads
            [n0, n0 + Np) of [N, Sq, Sk] has first_row = n0 * Sq; one with columns [f0, f0 + Fp) of [S, F] has
            first_column = f0.
    """
    rows = 1
    for size in shape[1:-1]:
        rows *= size
    of_rows = row_keys(keys, first_row, rows)[:, :, None]  # [B, rows, 1]
    column = torch.arange(first_column, first_column + shape[-1], device=keys.device)
    h = ((of_rows & _LOW) + column) & _LOW
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & _LOW
    h = h ^ _shift_right(of_rows, 32)
    h = ((h ^ (h >> 15)) * 0x735A2D97) & _LOW
    h = h ^ (h >> 15)
    return (h >= dropout_threshold(p)).reshape(shape)
