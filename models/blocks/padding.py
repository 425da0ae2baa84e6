"""Leaves padding out of the layers of an encoder, like `unpad_input` and `pad_input` of flash-attn.

Norms, linear layers, activations and dropout treat each position by itself, and nothing in training
reads what an encoder-decoder's encoder computes for padding: attention masks it, and the loss is
the decoder's. So these layers get the rows of the tokens alone, [T, 1, H]. Attention gets them too
where it has a kernel for samples without padding, and padding is on the right of every sample;
otherwise it gets [B, S, ...] with zeros at padding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mpu import dropout_state
from ...ops import empty_pooled
from ...ops.autograd import Function


class Tokens(NamedTuple):
    """Stands for the mask of a padded batch where the layers get the rows of its tokens alone.

    Attributes:
        mask: bool [B, 1, 1, S], False for padding.
        rows: The tokens' places in the flattened batch, ascending, int64 [T].
        padding: The places of the padding, int64 [B·S - T].
        sources: For each place the number of its token; for padding, that of some token; int64
            [B·S].
        starts: Where each sample's tokens begin among the rows, and where the last one's end, int64
            [B + 1]. None unless all padding is on the right.
    """

    mask: Tensor
    rows: Tensor
    padding: Tensor
    sources: Tensor
    starts: Tensor | None = None

    def unpad(self, x: Tensor) -> Tensor:
        """[B, S, C] -> [T, 1, C]"""
        return _Unpad.apply(x, self)

    def pad(self, x: Tensor) -> Tensor:
        """[T, 1, C] -> [B, S, C], zeros at padding"""
        return _Pad.apply(x, self)

    def naming_rows(self) -> AbstractContextManager[None]:
        """Returns a context in which dropout knows which positions the rows of its inputs are."""
        length = self.mask.shape[-1]
        samples = self.rows // length
        positions = self.rows % length
        return dropout_state.packed_rows(len(self.mask), samples, positions)


class _Unpad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        rows = empty_pooled(x, len(tokens.rows), x.shape[-1])
        return torch.index_select(x.flatten(0, 1), 0, tokens.rows, out=rows)[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return ctx.tokens.pad(grads[0]), None


class _Pad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        padded = empty_pooled(x, len(tokens.sources), x.shape[-1])
        torch.index_select(x[:, 0], 0, tokens.sources, out=padded).index_fill_(0, tokens.padding, 0)
        return padded.view(len(tokens.mask), -1, x.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return ctx.tokens.unpad(grads[0]), None
