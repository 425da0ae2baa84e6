"""Dropout whose mask is a function of (seed, sample, site, element) and of nothing else.

No generator is advanced, so the mask does not depend on how the model is laid out over processes, and recomputation
reproduces it. All arithmetic is on unsigned integers modulo 2^64 or 2^32, so C++ and CUDA can repeat it exactly:

    mix64(z): z ^= z >> 30; z *= 0xbf58476d1ce4e5b9; z ^= z >> 27; z *= 0x94d049bb133111eb; z ^= z >> 31
    chain(key, value) = mix64(key + 0x9e3779b97f4a7c15 * (value + 1))
    row key = chain(chain(chain(chain(mix64(seed), site), visit), sample), row)
    element(low, high, column): h = low + column
        h ^= h >> 16; h *= 0x21f0aaad; h ^= high; h ^= h >> 15; h *= 0x735a2d97; h ^= h >> 15
    kept = element(row key mod 2^32, row key >> 32, column) >= round(p * 2^32)

mix64 is the finaliser of SplitMix64 (Steele et al. 2014); the 32-bit constants are Wellons' low-bias ones. `row`
counts all dimensions between the batch and the last one of the sample's global tensor, `column` the last. `visit`
counts the uses of one site under one key, so a module that runs twice in a forward pass draws two masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .mesh import ParallelMesh, tp_rank, tp_size

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK_ELEMENTS = 1 << 21


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned integer: torch has no unsigned arithmetic."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift(tensor: Tensor, count: int, bits: int) -> Tensor:
    """Logical right shift."""
    return (tensor >> count).bitwise_and_((1 << (bits - count)) - 1)


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ _shift(z, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return z ^ _shift(z, 31, 64)


def _chain(key: Tensor, value: Tensor) -> Tensor:
    return _mix64(key + (value + 1) * _signed(_GOLDEN, 64))


def _scalar_mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _scalar_chain(key: int, value: int) -> int:
    return _scalar_mix64((key + _GOLDEN * (value + 1)) & _MASK64)


class DropoutKey(NamedTuple):
    """What a mask depends on besides its site. visits: uses so far of each site under this key."""

    seed: int
    first_sample: int
    visits: dict[int, int]


class DropoutState:
    """The key of the forward pass that is running. One per process: `dropout_state`."""

    def __init__(self) -> None:
        self._key: DropoutKey | None = None

    def set(self, seed: int, first_sample: int) -> None:
        """Call before every training forward pass.

        first_sample: global index of the first sample of this micro-batch, of which row b is sample first_sample + b.
        It must never repeat during a run (epochs included), or masks would.
        """
        self._key = DropoutKey(int(seed), int(first_sample), {})

    def capture(self) -> DropoutKey | None:
        """The current key, to be replayed later."""
        return self._key and self._key._replace(visits=dict(self._key.visits))

    @contextmanager
    def replay(self, key: DropoutKey | None) -> Iterator[None]:
        """Run with a captured key; the key that was current comes back afterwards."""
        current, self._key = self._key, key and key._replace(visits=dict(key.visits))
        try:
            yield
        finally:
            self._key = current

    def visit(self, site: int) -> tuple[int, int]:
        """(64-bit key of this use of the site, first sample). Raises `RuntimeError` before any `set`."""
        if self._key is None:
            raise RuntimeError("call dropout_state.set(seed, first_sample) before a forward pass with dropout")
        seed, first_sample, visits = self._key
        count = visits.get(site, 0)
        visits[site] = count + 1
        return _scalar_chain(_scalar_chain(_scalar_mix64(seed & _MASK64), site), count), first_sample


dropout_state = DropoutState()


def keep_mask(
    key: int, first_sample: int, shape: tuple[int, ...], p: float, device: torch.device, offsets=(), whole=()
) -> Tensor:
    """The elements that survive: bool of `shape` [B, ..., C], a part of a global tensor of shape `whole`.

    `offsets` says where the part begins. Both default to the part being everything. `first_sample` belongs to row 0.
    """
    offsets, whole = offsets or (0,) * len(shape), whole or shape
    options = {"device": device, "dtype": torch.int64}
    keys = torch.full((), _signed(key, 64), **options)  # unlike torch.tensor, no wait for the device
    keys = _chain(keys, first_sample + torch.arange(shape[0], **options))  # [B]
    row = torch.zeros((), **options)
    for count, offset, size in zip(shape[1:-1], offsets[1:-1], whole[1:-1], strict=True):
        row = row[..., None] * size + offset + torch.arange(count, **options)
    keys = _chain(keys[:, None], row.reshape(1, -1)).flatten()  # [B * R]
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    columns = (offsets[-1] + torch.arange(shape[-1], **options)).to(torch.int32)
    threshold = _signed(round(p * 2**32) ^ (1 << 31), 32)
    keep = torch.empty(len(keys), shape[-1], dtype=torch.bool, device=device)
    step = max(1, _CHUNK_ELEMENTS // max(shape[-1], 1))
    for start in range(0, len(keys), step):
        rows = slice(start, start + step)
        h = low[rows, None] + columns
        h = h.bitwise_xor_(_shift(h, 16, 32)).mul_(_signed(0x21F0AAAD, 32)).bitwise_xor_(high[rows, None])
        h = h.bitwise_xor_(_shift(h, 15, 32)).mul_(_signed(0x735A2D97, 32))
        h = h.bitwise_xor_(_shift(h, 15, 32)).bitwise_xor_(_signed(1 << 31, 32))  # unsigned order as signed
        torch.ge(h, threshold, out=keep[rows])
    return keep.view(shape)


class _Drop(Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return tensor.mul(scale).mul_(keep)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (keep,) = ctx.saved_tensors
        return grads[0].mul(ctx.scale).mul_(keep), None, None


class Dropout(nn.Module):
    """Dropout that every tensor-parallel layout of a model performs on the same elements.

    p: probability of zeroing an element; survivors are scaled by 1 / (1 - p).
    split_dim: the dimension of the input that is split over the tensor-parallel ranks (1 for a split sequence or for
        heads in [B, N, S, S], -1 for split features), or None where the input is replicated.

    Input [B, ..., C], at least two dimensions; the batch is dimension 0. `assign_dropout_sites` must have named the
    site (`materialize` and `initialize` do), and `dropout_state.set` the samples.
    """

    def __init__(self, p: float, *, split_dim: int | None = None, mesh: ParallelMesh | None = None):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability {p} must be at least 0 and below 1")
        self.p, self.split_dim, self.mesh = p, split_dim, mesh
        self.site: int | None = None

    def forward(self, tensor: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return tensor
        if self.site is None:
            raise RuntimeError("call assign_dropout_sites(model) once after building the model")
        key, first_sample = dropout_state.visit(self.site)
        offsets, whole = [0] * tensor.dim(), list(tensor.shape)
        if self.split_dim is not None:
            offsets[self.split_dim] = tp_rank(self.mesh) * tensor.shape[self.split_dim]
            whole[self.split_dim] *= tp_size(self.mesh)
        keep = keep_mask(key, first_sample, tuple(tensor.shape), self.p, tensor.device, offsets, whole)
        return _Drop.apply(tensor, keep, 1 / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}, split_dim={self.split_dim}"


def assign_dropout_sites(model: nn.Module, prefix: str = "") -> None:
    """Give every `Dropout` of the model a site derived from its qualified name.

    A pipeline stage passes the `prefix` that its modules have in the whole model.
    """
    for name, module in model.named_modules(prefix=prefix):
        if isinstance(module, Dropout):
            module.site = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
