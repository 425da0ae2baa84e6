"""Counter-based dropout: whether an element is kept is a pure integer function of where it is.

The mask of an element depends on (seed, global sample index, site, element index within the sample) and on
nothing else, so that it is the same whatever the tensor-parallel degree, the micro-batch size or the number
of recomputations. A sample's 64-bit key condenses (seed, sample, site); the element's 64-bit index is hashed
with it in 32-bit arithmetic, which PyTorch, C++, CUDA and Triton evaluate to identical bits.

The hash is two rounds of a multiply-xorshift finalizer (constants: MurmurHash3's fmix32 and Wellons'
lowbias32).
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def _int64(value: int) -> int:
    """The signed 64-bit integer with the same bits as `value` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(value: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 bits (Steele, Lea and Flood 2014)."""
    value = (value ^ _shift_right(value, 30)) * _int64(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * _int64(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def dropout_keys(seed: int, samples: torch.Tensor, site: int) -> torch.Tensor:
    """The key of each sample of a batch: int64 [B], from `seed`, global sample indices int64 [B] and a site's
    number.
    """
    golden = 0x9E3779B97F4A7C15
    start = _mix64(torch.full_like(samples, _int64(seed * golden + golden)))
    return _mix64(_mix64(start ^ samples) + _int64(site * golden + golden))


def dropout_threshold(p: float) -> int:
    """Elements whose 32-bit hash is below this are dropped. Raises ValueError unless 0 <= p < 1."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"a dropout probability must be at least 0 and less than 1, got {p}")
    return min(round(p * 2**32), _LOW)


def hash32(keys: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The 32-bit hash (as int64 in [0, 2^32)) of int64 element indices under int64 keys; the two broadcast."""
    h = (indices & _LOW) ^ (keys & _LOW)
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _LOW
    h = h ^ (h >> 13)
    h = (h + _shift_right(keys, 32) + _shift_right(indices, 32) * 0x9E3779B9) & _LOW
    h = (h * 0xC2B2AE35) & _LOW
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _LOW
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _LOW
    return h ^ (h >> 16)


def dropout_keep(
    keys: torch.Tensor, shape: tuple[int, ...], p: float, offset: int = 0, row_stride: int | None = None
) -> torch.Tensor:
    """Boolean mask of kept elements for a tensor [B, ..., C].

    Args:
        keys: int64 [B] of `dropout_keys`.
        shape: the tensor's shape; the first dimension is the batch.
        p: probability of dropping an element.
        offset: index, within the unsplit sample, of this tensor's first element.
        row_stride: distance in the unsplit sample between two rows of this tensor; its last dimension by
            default. A rank holding columns [f0, f0 + Fp) of [S, F] passes offset=f0 and row_stride=F.
    """
    batch, columns = shape[0], shape[-1]
    rows = 1
    for size in shape[1:-1]:
        rows *= size
    stride = columns if row_stride is None else row_stride
    row = torch.arange(rows, device=keys.device)[:, None] * stride + offset
    indices = row + torch.arange(columns, device=keys.device)  # [rows, C]
    kept = hash32(keys.reshape(batch, 1, 1), indices) >= dropout_threshold(p)
    return kept.reshape(shape)
