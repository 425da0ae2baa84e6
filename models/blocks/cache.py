"""Holds the key-value cache of decoding: the keys and values of earlier positions, for this rank's
heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerKVCache:
    """The keys and values of one attention layer, in buffers that are allocated once for `capacity`
    positions.

    Attributes:
        capacity: The number of positions that fit.
        length: The number of positions that are filled.
        keys, values: [B, Np, capacity, D]; None before the first `extend`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the keys and values of new positions, [B, Np, S, D], and returns those of all
        positions so far.

        Raises ValueError if they exceed the capacity.
        """
        stop = self.length + keys.shape[2]
        if stop > self.capacity:
            raise ValueError(
                f"the cache has room for {self.capacity} positions, but {stop} are needed"
            )
        if self.keys is None or self.values is None:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self.keys, self.values = keys.new_empty(shape), values.new_empty(shape)
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop
        return self.filled()

    def filled(self) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of all positions so far, [B, Np, length, D]."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def select(self, rows: Tensor) -> None:
        """Replaces row i by the previous row rows[i]. rows: int64 [B'], for any B'."""
        if self.keys is None or self.values is None:
            return
        keys, values = (kept.index_select(0, rows) for kept in self.filled())
        if len(rows) != self.keys.shape[0]:
            shape = (len(rows), *self.keys.shape[1:])
            self.keys, self.values = self.keys.new_empty(shape), self.values.new_empty(shape)
        self.keys[:, :, : self.length] = keys
        self.values[:, :, : self.length] = values

    def repeat(self, copies: int) -> None:
        """Replaces each row by `copies` consecutive copies of it."""
        if self.keys is not None:
            self.select(
                torch.arange(self.keys.shape[0], device=self.keys.device).repeat_interleave(copies)
            )

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in (self.keys, self.values) if kept is not None)


class Cache:
    """The keys and values of all layers of a model, which `forward(cache=…)` reads and extends.

    A rank holds 2 · layers · B · N/tp · (capacity + source_length) · D numbers.

    Args:
        layers: The number of layers.
        capacity: The number of positions to reserve.
        source_length: The length of the encoder's output, for a decoder that attends to it. Its
            keys and values are computed once, for as many rows as the encoder had.
    """

    def __init__(self, layers: int, capacity: int, source_length: int | None = None) -> None:
        self.layers = [LayerKVCache(capacity) for _ in range(layers)]
        self.sources = (
            [] if source_length is None else [LayerKVCache(source_length) for _ in range(layers)]
        )

    @property
    def length(self) -> int:
        """The number of positions so far.

        A pipeline stage fills only the layers of its own blocks.
        """
        return max(layer.length for layer in self.layers)

    def crop(self, length: int) -> None:
        """Forgets the positions after the first `length`. A stage keeps what it never filled."""
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def select(self, rows: Tensor) -> None:
        """Replaces sequence i by the previous sequence rows[i].

        The sources stay, because they belong to the batch.
        """
        for layer in self.layers:
            layer.select(rows)

    def repeat(self, copies: int) -> None:
        """Replaces each sequence by `copies` consecutive copies of it."""
        for layer in self.layers:
            layer.repeat(copies)

    @property
    def nbytes(self) -> int:
        """The size in bytes of this rank's allocated buffers."""
        return sum(layer.nbytes for layer in [*self.layers, *self.sources])
