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


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups", "normalize"),
    [(6, 2, 1, 1, True), (8, 3, 4, 2, False), (12, 4, 3, 3, True), (6, 1, 3, 1, True)],
)
def test_corrected_scores_choose_and_scores_weigh(experts, top_k, groups, top_groups, normalize):
    """Against the formulas of DeepSeek-V3, token by token, with gradients."""
    logits = torch.randn(9, experts, dtype=torch.float64, requires_grad=True)
    correction = torch.randn(experts) * 0.3
    weights, chosen = ops.route_by_corrected_scores(
        logits, correction, top_k, groups=groups, top_groups=top_groups, normalize=normalize, scale=2.5
    )  # fmt: skip
    again = logits.detach().clone().requires_grad_()
    expected = []
    size = experts // groups
    for token in range(9):
        scores = 1 / (1 + (-again[token]).exp())
        corrected = [(scores[e].item() + correction[e].item(), e) for e in range(experts)]
        by_group = [sorted(corrected[g * size : (g + 1) * size])[::-1] for g in range(groups)]
        by_group.sort(key=lambda group: -(group[0][0] + group[1][0]))
        best = sorted(pair for group in by_group[:top_groups] for pair in group)[::-1][:top_k]
        numbers = [number for _, number in best]
        assert chosen[token].tolist() == numbers
        own = scores[numbers]
        expected.append(2.5 * own / (own.sum() if normalize else 1))
    torch.testing.assert_close(weights, torch.stack(expected), rtol=1e-12, atol=0)
    factors = torch.randn_like(weights)
    (weights * factors).sum().backward()
    (torch.stack(expected) * factors).sum().backward()
    torch.testing.assert_close(logits.grad, again.grad, rtol=1e-10, atol=1e-14)


def test_16_bit_sums_are_rounded_once():
    inputs = make_inputs(40, 4, 4, dtype=torch.float32)
    narrow = [tensor.detach().bfloat16() for tensor in inputs]
    exact = [tensor.double() for tensor in narrow]
    error = (mix(*narrow, 4, True).double() - mix_naively(*exact, 4, True)).norm()
    naive = (mix_naively(*narrow, 4, True).double() - mix_naively(*exact, 4, True)).norm()
    assert error < naive


def test_equal_experts_have_the_smallest_loss():
    from shardzoo.models.blocks.moe import RouterSums

    even = RouterSums.from_scores([torch.eye(4).repeat(3, 1)[None] * 9], 1).balance_loss()
    skewed = RouterSums.from_scores([torch.eye(4)[:1].repeat(12, 1)[None] * 9], 1).balance_loss()
    torch.testing.assert_close(even, torch.tensor(1.0), rtol=0, atol=1e-6)
    assert skewed > 3.9


def scatter_weights(weights, experts, count):
    """[T, k] each -> the weight of each expert, [T, E]; a dropped choice has none."""
    dense = weights.new_zeros(len(weights), count + 1)
    return dense.scatter_add(1, experts, weights)[:, :count]


@pytest.mark.parametrize("capacity", [1, 3, 50])
def test_one_expert_within_capacity_is_that_of_transformers(capacity):
    from transformers import SwitchTransformersConfig, SwitchTransformersTop1Router

    rows, length, count = 3, 11, 4
    logits = torch.randn(rows, length, count, generator=torch.Generator().manual_seed(0))
    router = SwitchTransformersTop1Router(
        SwitchTransformersConfig(
            num_experts=count, d_model=count, expert_capacity=capacity, router_jitter_noise=0.0
        )
    )
    router.classifier.weight.data = torch.eye(count)
    chosen, expected, _ = router(logits)
    weights, experts = ops.route_within_capacity(logits, capacity, logits.dtype)
    kept = chosen.sum(-1)
    assert torch.equal(weights, expected[..., 0] * kept)
    assert torch.equal(experts, torch.where(kept == 1, chosen.argmax(-1), count))


@pytest.mark.parametrize(
    ("capacity", "first", "prioritize", "padded"),
    [
        (2, False, False, False),
        (4, True, True, True),
        (3, False, True, True),
        (99, True, False, True),
    ],
)
def test_two_experts_within_capacity_are_those_of_transformers(capacity, first, prioritize, padded):
    from transformers import NllbMoeConfig, NllbMoeTop2Router

    tokens, count = 17, 5
    logits = torch.randn(tokens, count, generator=torch.Generator().manual_seed(0))
    is_token = torch.arange(tokens) % 6 != 4 if padded else None
    router = NllbMoeTop2Router(
        NllbMoeConfig(
            num_experts=count, d_model=count, expert_capacity=capacity, moe_eval_capacity_token_fraction=-1.0,
            normalize_router_prob_before_dropping=first, batch_prioritized_routing=prioritize,
        )
    )  # fmt: skip
    padding = None if is_token is None else ~is_token
    _, expected = router.route_tokens(logits.clone(), padding_mask=padding)
    weights, experts = ops.route_twice_within_capacity(
        logits, capacity, logits.dtype, is_token, normalize_first=first, prioritize=prioritize
    )
    assert torch.allclose(scatter_weights(weights, experts, count), expected, rtol=1e-6, atol=0)
    assert torch.equal(weights == 0, experts == count)


def test_dropped_tokens_are_left_out_of_the_products():
    """The rows behind those of the experts give zeros and get zeros, in a buffer that held something else."""
    x, _, gate_up, _ = make_inputs(9, 3, 1)
    experts = torch.tensor([2, 3, 0, 3, 2, 0, 3, 2, 3])[:, None]
    order, counts = ops.sort_by_expert(experts, 3, drops=True)
    assert counts.tolist() == [2, 0, 3]
    rows = ops.permute_tokens(x, order, 1)
    y = ops.grouped_linear(rows, gate_up, counts, drops=True)
    kept = (experts < 3)[:, 0]
    assert torch.equal(y[5:], torch.zeros(4, 10, dtype=y.dtype))
    ops.combine_tokens(y, torch.ones(9, 1, dtype=y.dtype), order).sum().backward()
    assert bool((x.grad[~kept] == 0).all())
    expected = torch.stack([gate_up[e].sum(0) for e in experts[kept, 0]])
    assert torch.allclose(x.grad[kept], expected)


def test_biases_of_experts():
    from shardzoo.ops.experts import add_expert_bias

    rows = torch.zeros(6, 2)
    bias = torch.tensor([[1.0, 2], [3, 4], [5, 6]], requires_grad=True)
    y = add_expert_bias(rows, bias, torch.tensor([2, 0, 3]))
    assert y[:, 0].tolist() == [1, 1, 5, 5, 5, 5]  # the last row belongs to no expert
    y[:5].sum().backward()
    assert bias.grad.tolist() == [[2, 2], [0, 0], [3, 3]]


needs_kernels = pytest.mark.skipif(
    ops.variants.unavailable("cpp", "cpu") is not None, reason="no compiled kernels"
)
COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [1, 2, 3, 4]]


@pytest.fixture
def ours(monkeypatch):
    """The grouped products that our kernel computes, here of any size, type and processor."""
    from shardzoo.ops import library
    from shardzoo.ops.cpu import products

    kinds = (torch.float32, torch.bfloat16, torch.float16)
    monkeypatch.setattr(products, "_kernel_dtypes", lambda: kinds)
    monkeypatch.setattr(products, "_min_product", lambda dtype: 0)
    seen, call = [], library.call_compiled

    def remember(name, *arguments):
        seen.append(name)
        return call(name, *arguments)

    monkeypatch.setattr(library, "call_compiled", remember)
    return seen


@needs_kernels
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
def test_the_kernel_rounds_grouped_products_once(kind, transposed, ours):
    """Products and both gradients, also of experts without rows, and zeros behind the experts' rows."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(kind)

    multiply = ops.grouped_linear if transposed else ops.grouped_product
    for counts in COUNTS:
        rows = sum(counts) + 2
        x, weight = draw(rows, 33).requires_grad_(), draw(4, 33, 50)
        if transposed:
            weight = weight.transpose(1, 2).contiguous()
        weight.requires_grad_()
        grad = draw(rows, 50)
        y = multiply(x, weight, torch.tensor(counts), drops=True)
        y.backward(grad)

        matrices = weight.detach().double()
        if transposed:
            matrices = matrices.transpose(1, 2)
        exact = [torch.zeros(rows, 50), torch.zeros(rows, 33), torch.zeros_like(matrices)]
        start = 0
        for number, count in enumerate(counts):
            own = slice(start, start + count)
            start += count
            wide, wide_grad = x.detach()[own].double(), grad[own].double()
            exact[0][own] = wide @ matrices[number]
            exact[1][own] = wide_grad @ matrices[number].t()
            exact[2][number] = wide.t() @ wide_grad
        weight_grad = weight.grad.transpose(1, 2) if transposed else weight.grad
        # One rounding of the type, and of fp32 for each of at most 50 terms of about 1.
        unit = 0 if kind is torch.float32 else torch.finfo(kind).eps / 2
        for found, expected in zip((y, x.grad, weight_grad), exact, strict=True):
            error = (found.double() - expected.double()).abs()
            assert bool((error <= 1.01 * unit * expected.abs() + 1e-4).all())
            assert found.dtype == kind
        assert torch.equal(y[-2:], torch.zeros_like(y[-2:]))
        assert torch.equal(x.grad[-2:], torch.zeros_like(x.grad[-2:]))
    assert ours.count("grouped_product") == 2 * len(COUNTS)
    assert ours.count("grouped_outer_product") == len(COUNTS)


@needs_kernels
def test_grouped_products_have_the_bits_of_single_ones_and_are_counted(ours):
    from torch.utils.flop_counter import FlopCounterMode

    from shardzoo.ops import library

    x, weight = torch.randn(9, 40), torch.randn(3, 24, 40, requires_grad=True)
    counts = torch.tensor([2, 0, 7])
    y = ops.grouped_linear(x, weight, counts)
    single = library.call_compiled("matrix_product", x[2:], weight[2].detach().t(), None)
    assert torch.equal(y[2:], single)
    with FlopCounterMode(display=False) as counter:
        again = ops.grouped_linear(x, weight, counts)
        again.sum().backward()
    assert torch.equal(again, y)
    assert counter.get_total_flops() == 2 * 2 * 9 * 24 * 40


@needs_kernels
def test_grouped_products_of_wrong_sizes_are_refused():
    from shardzoo.ops import library

    x, weight, y = torch.randn(5, 4), torch.randn(2, 4, 3), torch.empty(5, 3)
    for counts, message in (([3, 3], "6 rows"), ([5], "1 groups"), ([7, -2], "groups of")):
        with pytest.raises(RuntimeError, match=message):
            library.call_compiled("grouped_product", x, weight, counts, False, y)
    for bad in (torch.empty(5, 4), torch.empty(3, 5).t(), torch.empty(5, 3).double()):
        with pytest.raises(RuntimeError):
            library.call_compiled("grouped_product", x, weight, [2, 3], False, bad)
        with pytest.raises(RuntimeError):
            library.call_compiled("grouped_outer_product", x, bad, [2, 3], torch.empty(2, 4, 3))
