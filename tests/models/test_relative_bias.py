"""The gradient of a relative bias, which a few numbers get from many distances."""

from __future__ import annotations

import torch

from shardzoo.models.blocks.relative_bias import RelativeBias, relative_buckets


def test_the_gradient_of_a_16_bit_bias_is_rounded_once():
    """Each bucket's gradient of a sum is its number of distances: up to hundreds, which 16-bit sums would miss."""
    bias = RelativeBias(32, 2, 128, bidirectional=True)
    torch.nn.init.zeros_(bias.weight)
    bias = bias.to(torch.bfloat16)
    size = 600
    bias(size, size).sum().backward()  # of each distance
    buckets = relative_buckets(torch.arange(1 - size, size), 32, 128, True)
    counts = torch.bincount(buckets, minlength=32)
    assert counts.max() > 300
    wanted = counts[:, None].expand(32, 2).float()
    torch.testing.assert_close(bias.weight.grad.float(), wanted, rtol=2**-8, atol=0)
