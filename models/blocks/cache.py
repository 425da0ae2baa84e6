"""Holds the key-value cache of decoding: the keys and values of earlier positions, for this rank's
heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LayerKVCache:
    """The keys and values of one attention layer, in buffers that are allocated once for `capacity`
    positions.

    Attributes:
        capacity: The number of positions that fit.
        length: The number of positions that are filled.
        keys, values: [B, Np, capacity, D]; None before the first `extend`. Of latent attention, the
            latent vectors and the rotated keys, which have one head and widths of their own.
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
            shape = (*keys.shape[:2], self.capacity)
            self.keys = keys.new_empty(*shape, keys.shape[3])
            self.values = values.new_empty(*shape, values.shape[3])
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
            self.keys = self.keys.new_empty(len(rows), *self.keys.shape[1:])
            self.values = self.values.new_empty(len(rows), *self.values.shape[1:])
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
        self.layers: Sequence[LayerKVCache] = [LayerKVCache(capacity) for _ in range(layers)]
        self.sources: Sequence[LayerKVCache] = (
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

    def to_transformers(self, rows: int | None = None, own: Any = None) -> Any:
        """Returns a cache of transformers with the positions so far.

        Args:
            rows: The number of sequences; by default that of the sources, whose rows are repeated
                if there are more sequences.
            own: An empty cache to fill; by default a `DynamicCache`.
        """
        from transformers import DynamicCache, EncoderDecoderCache

        if own is None:
            own = DynamicCache()
        for number, layer in enumerate(self.layers):
            own.update(*layer.filled(), number)
        if not self.sources:
            return own
        cross: Any = DynamicCache()
        for number, layer in enumerate(self.sources):
            keys, values = layer.filled()
            copies = 1 if rows is None else rows // len(keys)
            if copies > 1:
                keys = keys.repeat_interleave(copies, 0)
                values = values.repeat_interleave(copies, 0)
            cross.update(keys, values, number)
        return EncoderDecoderCache(own, cross)

    @property
    def nbytes(self) -> int:
        """The size in bytes of this rank's allocated buffers."""
        return sum(layer.nbytes for layer in [*self.layers, *self.sources])


class NewLayer(LayerKVCache):
    """The keys and values that one call computes, which it keeps without copying them."""

    def __init__(self) -> None:
        super().__init__(0)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps the keys and values of a whole sequence, [B, Np, S, D], and returns them."""
        self.keys = keys
        self.values = values
        self.length = keys.shape[2]
        return keys, values


class NewCache(Cache):
    """The keys and values of one call, in case the caller reads `past_key_values` of its output."""

    def __init__(self, layers: int, *, has_sources: bool) -> None:
        self.layers = [NewLayer() for _ in range(layers)]
        self.sources = [NewLayer() for _ in range(layers)] if has_sources else []


class TransformersLayer(LayerKVCache):
    """The keys and values of one attention layer, in a `Cache` of transformers.

    Attributes:
        cache: The cache, with the heads of this rank.
        layer: The number of the layer.
    """

    def __init__(self, cache: Any, layer: int) -> None:
        self.cache = cache
        self.layer = layer

    @property
    def length(self) -> int:
        """The number of positions so far."""
        return int(self.cache.get_seq_length(self.layer))

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerKVCache.extend`. A cache that keeps a sliding window returns its keys alone."""
        stop = self.length + keys.shape[2]
        keys, values = self.cache.update(keys, values, self.layer)
        return keys[:, :, :stop], values[:, :, :stop]  # a static cache has room for more

    def filled(self) -> tuple[Tensor, Tensor]:
        """See `LayerKVCache.filled`."""
        stored = self.cache.layers[self.layer]
        return stored.keys[:, :, : self.length], stored.values[:, :, : self.length]

    def select(self, rows: Tensor) -> None:
        """See `LayerKVCache.select`."""
        stored = self.cache.layers[self.layer]
        stored.keys = stored.keys.index_select(0, rows)
        stored.values = stored.values.index_select(0, rows)

    def repeat(self, copies: int) -> None:
        """See `LayerKVCache.repeat`."""
        self.cache.layers[self.layer].batch_repeat_interleave(copies)


class TransformersSource(TransformersLayer):
    """The keys and values of an encoder's output for one layer, in an `EncoderDecoderCache`."""

    def __init__(self, cache: Any, layer: int) -> None:
        super().__init__(cache.cross_attention_cache, layer)
        self.is_updated = cache.is_updated

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.is_updated[self.layer] = True
        return super().extend(keys, values)


class TransformersCache(Cache):
    """A `Cache` of transformers in the place of our own, for loops that hand it from call to call.

    Args:
        cache: The cache; for a decoder that attends to an encoder's output, an
            `EncoderDecoderCache`.
        layers: The number of layers.
        has_sources: Whether the decoder attends to an encoder's output.
    """

    def __init__(self, cache: Any, layers: int, *, has_sources: bool) -> None:
        self.cache = cache
        own = cache.self_attention_cache if has_sources else cache
        self.layers = [TransformersLayer(own, layer) for layer in range(layers)]
        self.sources = []
        if has_sources:
            self.sources = [TransformersSource(cache, layer) for layer in range(layers)]

    @property
    def length(self) -> int:
        return self.layers[0].length

    def crop(self, length: int) -> None:
        raise NotImplementedError("a cache of transformers is not used with drafted tokens")

    def to_transformers(self, rows: int | None = None, own: Any = None) -> Any:
        return self.cache
