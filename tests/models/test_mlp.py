"""A gated feed-forward whose gate and up are one parameter, compared with two products of PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from shardzoo.models.blocks.mlp import GatedMLP, _Halves
from shardzoo.models.parallel_config import ParallelConfig


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_gate_has_the_outputs_and_gradients_of_two_projections(bias):
    torch.manual_seed(0)
    layer = GatedMLP(6, 10, "silu", fused=True, bias=bias, parallel_config=ParallelConfig())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    mine = dict(layer.named_parameters())
    theirs = {name: value.detach().clone().requires_grad_() for name, value in mine.items()}
    x = torch.randn(2, 5, 6, requires_grad=True)
    weights = torch.randn(2, 5, 6)

    def run_plain(x):
        gate, up = theirs["gate_up.weight"].split(10)
        gate_bias, up_bias = [None, None]
        if bias:
            gate_bias, up_bias = theirs["gate_up.bias"].split(10)
        product = silu(linear(x, gate, gate_bias)) * linear(x, up, up_bias)
        return linear(product, theirs["down.weight"], theirs.get("down.bias"))

    plain_x = x.detach().clone().requires_grad_()
    output = layer(x)
    expected = run_plain(plain_x)
    torch.testing.assert_close(output, expected)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad)
    for name, value in mine.items():
        torch.testing.assert_close(value.grad, theirs[name].grad, msg=name)


def test_a_cpu_writes_both_gradients_into_their_places():
    x = torch.randn(3, 8, requires_grad=True)
    first, second = _Halves.apply(x)
    (2 * first.sum() + 3 * second.sum()).backward()
    assert x.grad[:, :4].unique().tolist() == [2.0]
    assert x.grad[:, 4:].unique().tolist() == [3.0]
