"""Attention with sinks against a softmax with one more column, in fp64 with gradients."""

from __future__ import annotations

import pytest
import torch

from shardzoo import ops

SCALE = 0.3
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
RULES = {
    "causal, dropout": {"causal": True, "dropout": 0.3},
    "window": {"mask": torch.ones(9, 12, dtype=torch.bool).tril(3).triu(1)[None, None]},
    "prefix, short rows": {
        "causal": True,
        "prefix": torch.tensor([4, 0]),
        "key_lengths": torch.tensor([12, 0]),  # the second sample sees no key
    },
    "added": {"mask": torch.linspace(-2, 2, 12).view(1, 1, 1, 12), "dropout": 0.1},
}


def normal(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def written_out(q, k, v, sinks, *, causal=False, mask=None, dropout=0.0, keys=None, **lengths):
    """The definition, with the sink as a last column of the scores."""
    batch, heads, queries, _ = q.shape
    total = k.shape[2]
    served = heads // k.shape[1]
    z = SCALE * q @ k.repeat_interleave(served, 1).mT
    if mask is not None and mask.dtype != torch.bool:
        z = z + mask
        mask = None
    seen = torch.ones(batch, 1, queries, total, dtype=torch.bool)
    key = torch.arange(total)
    if causal:
        seen = seen & (key <= torch.arange(queries)[:, None] + total - queries)
    if "prefix" in lengths:
        seen = seen | (key < lengths["prefix"].view(-1, 1, 1, 1))
    if "key_lengths" in lengths:
        seen = seen & (key < lengths["key_lengths"].view(-1, 1, 1, 1))
    if mask is not None:
        seen = seen & mask
    z = z.masked_fill(~seen, float("-inf"))
    column = sinks.view(1, -1, 1, 1).expand(batch, -1, queries, 1)
    probabilities = torch.cat([z, column], -1).softmax(-1)[..., :-1]
    if dropout:
        whole = torch.zeros(probabilities.shape)
        dropped = ops.masked_softmax(whole, dropout=dropout, keys=keys, first_head=2)
        probabilities = probabilities * (dropped != 0) / (1 - dropout)
    return probabilities @ v.repeat_interleave(served, 1)


def run(function, tensors, **rules):
    """Returns the output and the gradients of q, k, v and the sinks."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*leaves, **rules)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype))


@pytest.mark.parametrize(
    ("kernels", "precision"),
    [
        ("reference", torch.float64),
        ("auto", torch.float32),
        ("auto", torch.bfloat16),
        ("triton", torch.float32),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_equal_to_a_softmax_with_one_more_column(kernels, precision, name):
    rules = dict(RULES[name])
    tensors = [normal(2, 4, 9, 16), normal(2, 2, 12, 16), normal(2, 2, 12, 16).roll(1), normal(4)]
    tensors = [tensor.to(precision) for tensor in tensors]
    if rules.get("dropout"):
        rules["keys"] = ops.dropout_keys(3, 1, 2)
    expected = run(written_out, [tensor.double() for tensor in tensors], **rules)
    if rules.get("mask") is not None and rules["mask"].is_floating_point():
        rules["mask"] = rules["mask"].to(precision)
    with ops.kernels(kernels):
        found = run(ops.attention_with_sinks, tensors, scale=SCALE, first_head=2, **rules)
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == precision
        error = (value.double() - wanted).abs().max()
        assert error <= TOLERANCES[precision] * wanted.abs().max().clamp(min=1), name


@pytest.mark.before_release
def test_opcheck():
    q, k, sinks = (normal(*shape).float() for shape in ((2, 2, 5, 8), (2, 1, 5, 8), (2,)))
    for tensor in (q, k, sinks):
        tensor.requires_grad_()
    keys = ops.dropout_keys(1, 0, 2)
    arguments = (q, k, k, sinks, None, None, None, keys, SCALE, True, 0.2, 0, 0)
    torch.library.opcheck(torch.ops.shardzoo.attention_with_sinks.default, arguments)


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(1, 3), torch.zeros(3).long()])
def test_sinks_are_one_number_for_each_head(sinks):
    q = torch.zeros(1, 3, 4, 8)
    with pytest.raises(ValueError, match="one number for each of 3 heads"):
        ops.attention_with_sinks(q, q, q, sinks, scale=1.0)


def test_the_clamped_swiglu_is_its_formula():
    gate_up = 3 * normal(5, 14)

    def formula(x):
        gate = x[..., ::2].clamp(max=2.0)
        up = x[..., 1::2].clamp(-2.0, 2.0)
        return (up + 1) * gate * torch.sigmoid(1.7 * gate)

    expected = run(formula, [gate_up])
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-5)):
        found = run(lambda x: ops.clamped_swiglu(x, 1.7, 2.0), [gate_up.to(dtype)])
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value.double(), wanted, rtol=tolerance, atol=tolerance)
    arguments = (gate_up.requires_grad_(), 1.7, 2.0)
    torch.library.opcheck(torch.ops.shardzoo.clamped_swiglu.default, arguments)
