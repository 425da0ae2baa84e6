"""Products and ReLUs whose results lie in the pool: PyTorch's results, and its own way wherever somebody looks."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from shardzoo import ops
from shardzoo.ops import native, onednn
from shardzoo.ops.library import POOLED
from shardzoo.ops.product import linear_product, product
from shardzoo.ops.relu import relu

LARGE = 1 << 20  # elements


@pytest.fixture
def in_pool(monkeypatch):
    """The sizes of the results that were written into the pool's memory, oneDNN's being none of them."""
    monkeypatch.setattr(onednn, "is_quicker", lambda: False)
    products = sys.modules[product.__module__]
    seen, empty_pooled = [], products.empty_pooled

    def remember(like, *size):
        seen.append(size)
        return empty_pooled(like, *size)

    monkeypatch.setattr(products, "empty_pooled", remember)
    return seen


def heads(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """[2, 3, 430, 24] as a view of features."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, 430, 3, 24, generator=g).to(dtype).transpose(1, 2)


def results(function, *inputs):
    """The output and the gradients of a sum with weights."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    g = torch.Generator().manual_seed(9)
    grads = torch.autograd.grad(
        output, [x for x in leaves if x is not None], torch.randn(output.shape, generator=g).to(output.dtype)
    )
    return [output.detach(), *grads]


def assert_same_bits(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_attention_is_that_of_pytorch(dtype, in_pool):
    """Up to the order of sums: another layout in memory is another kernel."""
    q, k, v = (heads(seed, dtype) for seed in range(3))
    scores = results(lambda q, k: product(q, k.mT), q, k)
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 430 * torch.finfo(dtype).eps}  # of sums of 430 terms
    torch.testing.assert_close(scores, results(lambda q, k: q @ k.mT, q, k), **tolerance)
    torch.testing.assert_close(results(product, scores[0], v), results(torch.matmul, scores[0], v), **tolerance)
    large = (2, 3, 430, 430)
    assert in_pool == [large, large]  # the scores, and the gradient of the weights


@pytest.mark.parametrize("biased", [True, False])
def test_linear_has_the_bits_of_pytorch(dtype, biased, in_pool):
    g = torch.Generator().manual_seed(4)
    x, weight, bias = (torch.randn(*size, generator=g).to(dtype) for size in ((2, 900, 64), (1250, 64), (1250,)))
    for rows in (x, x.transpose(0, 1), x[0]):
        inputs = (rows, weight, bias if biased else None)
        in_pool.clear()
        assert_same_bits(results(linear_product, *inputs), results(F.linear, *inputs))
        large = rows.numel() // 64 * 1250 * dtype.itemsize >= POOLED and (rows.is_contiguous() or not biased)
        assert in_pool == ([(*rows.shape[:-1], 1250)] if large else [])
    with torch.no_grad():
        assert torch.equal(linear_product(x, weight, bias), F.linear(x, weight, bias))


def test_relu_has_the_bits_of_pytorch(dtype):
    x = torch.randn(3, LARGE, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    x[1, :5] = 0.0
    for one, other in zip(results(relu, x), results(F.relu, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_only_the_gradients_that_are_wanted(in_pool):
    x, weight = torch.randn(2048, 512), torch.randn(1024, 512, requires_grad=True)
    (grad,) = torch.autograd.grad(linear_product(x, weight, None).sum(), weight)
    assert grad.shape == weight.shape
    assert in_pool == [(2048, 1024), (1024, 512)]  # the gradient of x is not there
    a = torch.randn(4, 512, 512)
    (grad,) = torch.autograd.grad(product(a.requires_grad_(), torch.randn(4, 512, 512)).sum(), a)
    assert in_pool[2:] == [(4, 512, 512)] * 2


def test_heads_stay_where_they_are(in_pool):
    """Neither is attention's output, nor are the gradients of q, k and v, copied into a layout of their own."""
    q, k, v = (torch.randn(2, 600, 8, 64).transpose(1, 2).requires_grad_() for _ in range(3))
    output = product(product(q, k.mT), v)
    for tensor in (output, *torch.autograd.grad(output, (q, k, v), torch.randn_like(output))):
        assert tensor.stride() == q.stride()


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without it")


@needs_onednn
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [True, False])
def test_onednn_is_exact_to_rounding(transposed, biased):
    """Each sum of K products is within K roundings of the sum of their sizes (Higham 2002, section 3.1)."""
    g = torch.Generator().manual_seed(4)
    x, weight = torch.randn(2, 700, 600, generator=g), torch.randn(600, 600, generator=g)
    weight = weight.t() if transposed else weight
    inputs = (x, weight, torch.randn(600, generator=g) if biased else None)
    exact = F.linear(*(None if tensor is None else tensor.double() for tensor in inputs))
    sizes = F.linear(*(None if tensor is None else tensor.double().abs() for tensor in inputs))
    error = (onednn.linear(*inputs) - exact).abs()
    assert (error <= (600 + biased) * torch.finfo(torch.float32).eps / 2 * sizes).all()


@needs_onednn
def test_onednn_does_large_products_of_fp32(monkeypatch):
    shapes, linear = [], onednn.linear
    monkeypatch.setattr(onednn, "is_quicker", lambda: True)
    monkeypatch.setattr(onednn, "linear", lambda x, *others: shapes.append(tuple(x.shape)) or linear(x, *others))
    g = torch.Generator().manual_seed(4)
    x, weight, bias = (torch.randn(*size, generator=g) for size in ((2, 1400, 96), (600, 96), (600,)))
    for own, other in zip(results(linear_product, x, weight, bias), results(F.linear, x, weight, bias), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-3)  # of sums of up to 2800 terms
    assert shapes == [(2, 1400, 96), (2800, 600)]  # the output and the gradient of x
    for rows in (x[:, ::2], x.double(), x[:1, :900]):
        linear_product(rows, weight.to(rows.dtype), None)
    assert len(shapes) == 2


@needs_onednn
def test_onednn_gets_only_what_it_reads_rightly(monkeypatch):
    """It takes a bias to be dense, and knows no matrix whose rows overlap."""
    monkeypatch.setattr(onednn, "is_quicker", lambda: True)
    g = torch.Generator().manual_seed(4)
    x, weight, values = (torch.randn(*size, generator=g) for size in ((256, 1024), (1024, 1024), (3 * 1024,)))
    biases = (
        values[::3],
        values[:1].expand(1024),
        values[0],
        values[:1],
        values[:1024].view(1, -1),
        values[:256, None],
    )
    for bias in biases:
        torch.testing.assert_close(linear_product(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-3)
    overlapping = values.unfold(0, 1024, 2)
    torch.testing.assert_close(linear_product(x, overlapping, None), F.linear(x, overlapping), rtol=1e-5, atol=1e-3)


def test_gradients_of_complex_numbers_and_forward_ones():
    g = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(*size, generator=g, dtype=torch.complex64) for size in ((512, 512), (512, 512)))
    assert_same_bits(results(linear_product, x, weight, None), results(F.linear, x, weight, None))
    assert_same_bits(results(product, x, weight), results(torch.matmul, x, weight))
    x, weight, tangent = x.real.contiguous(), weight.real.contiguous(), weight.imag.contiguous()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(linear_product(dual, weight, None)).tangent
    assert torch.equal(found, F.linear(tangent, weight))


def test_small_results_are_pytorchs(in_pool):
    x, weight = torch.randn(5, 7, requires_grad=True), torch.randn(3, 7)
    assert type(linear_product(x, weight, None).grad_fn).__name__ != "_LinearBackward"
    assert type(product(x, weight.t()).grad_fn).__name__ == "MmBackward0"
    assert linear_product(x[0], weight, None).shape == (3,)
    assert product(torch.zeros(2, 0, 5), torch.zeros(2, 5, 4)).shape == (2, 0, 4)
    assert in_pool == []


def test_nobody_who_looks_is_passed_by(in_pool):
    """Autocast, function transforms, the compiler."""
    x, weight = torch.randn(2048, 512), torch.randn(1024, 512)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_product(x, weight, None).dtype == torch.bfloat16
    per_row = torch.vmap(linear_product, in_dims=(0, None, None))(x.view(2, 1024, 512), weight, None)
    torch.testing.assert_close(per_row.flatten(0, 1), F.linear(x, weight))
    tangents = torch.func.jvp(lambda x: linear_product(x, weight, None), (x,), (x,))
    torch.testing.assert_close(*tangents)
    compiled = torch.compile(lambda x: product(x, x.mT), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x @ x.mT)
    assert in_pool == []


@pytest.mark.parametrize("quicker", [False, pytest.param(True, marks=needs_onednn)])
def test_counting_changes_no_bit(monkeypatch, quicker):
    """The trainer counts a process's first step, which in a resumed run is one that was not counted before."""
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(onednn, "is_quicker", lambda: quicker)
    q, k, v = (heads(seed, torch.float32) for seed in range(3))
    x, weight = torch.randn(2048, 512), torch.randn(1024, 512)
    calls = ((product, q, k.mT), (product, torch.rand(2, 3, 430, 430), v), (linear_product, x, weight, None))
    for call in calls:
        expected = results(*call)
        with FlopCounterMode(display=False) as counter:
            counted = results(*call)
        assert_same_bits(counted, expected)
        a, b = call[1:3]
        columns = b.shape[0] if call[0] is linear_product else b.shape[-1]
        assert counter.get_total_flops() == 3 * 2 * a.numel() * columns


@pytest.mark.skipif(native.load_error() is not None, reason="the pool is a compiled part")
def test_memory_is_used_again(in_pool):
    x, weight = torch.randn(1024, 64, requires_grad=True), torch.randn(2048, 64)
    first = ops.linear(x, weight)
    place, kept = first.data_ptr(), first.detach().clone()
    del first
    second = ops.linear(x, weight)
    assert second.data_ptr() == place
    third = ops.linear(x, weight)
    assert third.data_ptr() != place
    assert torch.equal(second, kept)
