"""What decoding keeps of earlier positions: the keys and values of this rank's heads."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerKVCache:
    """Keys and values of one attention layer, in buffers that are made once for `capacity` positions.

    length: how many positions are filled.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.keys: Tensor | None = None  # [B, Np, capacity, D]
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps new positions [B, Np, S, D]; returns all so far, [B, Np, length, D]. ValueError past the capacity."""
        stop = self.length + keys.shape[2]
        if stop > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} positions, but {stop} are needed")
        if self.keys is None or self.values is None:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self.keys, self.values = keys.new_empty(shape), values.new_empty(shape)
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop
        return self.filled()

    def filled(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions so far, [B, Np, length, D]."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was; rows: int64 [B'], for any B'."""
        if self.keys is None or self.values is None:
            return
        keys, values = (kept.index_select(0, rows) for kept in self.filled())
        if len(rows) != self.keys.shape[0]:
            shape = (len(rows), *self.keys.shape[1:])
            self.keys, self.values = self.keys.new_empty(shape), self.values.new_empty(shape)
        self.keys[:, :, : self.length] = keys
        self.values[:, :, : self.length] = values

    def repeat(self, copies: int) -> None:
        """Each row becomes `copies` rows, one after another."""
        if self.keys is not None:
            self.select(torch.arange(self.keys.shape[0], device=self.keys.device).repeat_interleave(copies))

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in (self.keys, self.values) if kept is not None)


class Cache:
    """The keys and values of a model's layers, which `forward(cache=…)` reads and extends.

    capacity: positions to make room for. source_length: of the encoder's output, for a decoder that attends to it;
    its keys and values are calculated once, for as many rows as the encoder had. A rank holds
    2 · layers · B · N/tp · (capacity + source_length) · D numbers.
    """

    def __init__(self, layers: int, capacity: int, source_length: int | None = None) -> None:
        self.layers = [LayerKVCache(capacity) for _ in range(layers)]
        self.sources = [] if source_length is None else [LayerKVCache(source_length) for _ in range(layers)]

    @property
    def length(self) -> int:
        """How many positions came before the next ones."""
        return self.layers[0].length

    def select(self, rows: Tensor) -> None:
        """Sequence i becomes a continuation of what sequence rows[i] was. Sources stay: they belong to the batch."""
        for layer in self.layers:
            layer.select(rows)

    def repeat(self, copies: int) -> None:
        """Each sequence becomes `copies` of it, one after another."""
        for layer in self.layers:
            layer.repeat(copies)

    @property
    def nbytes(self) -> int:
        """Of the buffers that exist, on this rank."""
        return sum(layer.nbytes for layer in [*self.layers, *self.sources])
