"""Routing, permutation and grouped products against the naive reference, in fp64 with gradients."""

from __future__ import annotations

import pytest
import torch

from shardzoo import ops


def make_inputs(tokens, experts, top_k, chosen=None, dtype=torch.float64):
    """x, the router's scores, and the matrices of experts of odd sizes; chosen: the only expert of all tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    x, logits = draw(tokens, 7), draw(tokens, experts)
    if chosen is not None:
        with torch.no_grad():
            logits[:, chosen] += 50
    return [x, logits, draw(experts, 10, 7), draw(experts, 5, 7)]


def activate(projected):
    gate, up = projected.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def mix(x, logits, gate_up, down, top_k, normalize):
    weights, experts = ops.route_tokens(logits, top_k, normalize=normalize)
    order, counts = ops.sort_by_expert(experts, len(gate_up))
    rows = ops.permute_tokens(x, order, top_k)
    rows = ops.grouped_product(activate(ops.grouped_linear(rows, gate_up, counts)), down, counts)
    return ops.combine_tokens(rows, weights, order)


def mix_naively(x, logits, gate_up, down, top_k, normalize):
    weights, experts = ops.route_tokens(logits, top_k, normalize=normalize)
    return ops.mix_experts(x, weights, experts, gate_up, down, activate)


CASES = [
    # tokens, experts, experts of a token, the only expert chosen first, normalized
    (11, 5, 2, None, True),
    (11, 5, 2, None, False),
    (3, 16, 1, None, True),  # most experts are empty
    (9, 4, 1, 2, True),  # all tokens on one expert
    (1, 3, 3, None, True),  # one token
    (6, 1, 1, None, True),
]


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_loop_over_experts(case):
    tokens, experts, top_k, chosen, normalize = case
    inputs = make_inputs(tokens, experts, top_k, chosen)
    copies = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    y = mix(*inputs, top_k, normalize)
    expected = mix_naively(*copies, top_k, normalize)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    for tensor, copy in zip(inputs, copies, strict=True):
        torch.testing.assert_close(tensor.grad, copy.grad, rtol=0, atol=1e-13)


def test_gradients_by_differences():
    inputs = make_inputs(5, 3, 2)
    assert torch.autograd.gradcheck(lambda *tensors: mix(*tensors, 2, True), inputs)


def test_weights_over_the_chosen_alone():
    logits = torch.randn(4, 6, dtype=torch.float64)
    weights, experts = ops.route_tokens(logits, 3, softmax_first=False)
    expected, chosen = ops.route_tokens(logits, 3, normalize=True)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected)


def test_16_bit_sums_are_rounded_once():
    inputs = make_inputs(40, 4, 4, dtype=torch.float32)
    narrow = [tensor.detach().bfloat16() for tensor in inputs]
    exact = [tensor.double() for tensor in narrow]
    error = (mix(*narrow, 4, True).double() - mix_naively(*exact, 4, True)).norm()
    naive = (mix_naively(*narrow, 4, True).double() - mix_naively(*exact, 4, True)).norm()
    assert error < naive


def test_equal_experts_have_the_smallest_loss():
    from shardzoo.models.blocks.moe import balance_loss

    even = balance_loss([torch.eye(4).repeat(3, 1)[None] * 9], 1)
    skewed = balance_loss([torch.eye(4)[:1].repeat(12, 1)[None] * 9], 1)
    torch.testing.assert_close(even, torch.tensor(1.0), rtol=0, atol=1e-6)
    assert skewed > 3.9
