"""The product of few rows against fp64, where it gives way to PyTorch's, and calls that go past the dispatcher."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from shardzoo import ops
from shardzoo.ops import dispatch, native

needs_kernels = pytest.mark.skipif(dispatch.unavailable("cpp", "cpu") is not None, reason="no compiled kernels")
ROUNDING = {torch.float32: 2**-24, torch.float64: 2**-53, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the products that the kernel does."""
    seen, call = [], native.call

    def remember(name, x, *arguments):
        seen.append(tuple(x.shape))
        return call(name, x, *arguments)

    monkeypatch.setattr(native, "call", remember)
    return seen


def operands(shape, features, dtype=torch.float32):
    """x of a shape [..., C], weight and bias."""
    g = torch.Generator().manual_seed(features)
    sizes = (shape, (features, shape[-1]), (features,))
    return [torch.randn(*size, generator=g, dtype=torch.float64).to(dtype) for size in sizes]


@needs_kernels
@pytest.mark.parametrize("columns", [1, 7, 16, 37, 130])
def test_matches_fp64(columns, dtype, calls):
    expected_calls = 0
    for rows in (1, 2, 3, 4, 5, 7, 8):
        for features in (1, 3, 8, 29):
            x, weight, bias = operands((rows, 1, columns), features, dtype)
            for added in (bias, None):
                with torch.inference_mode():
                    y = ops.linear(x, weight, added)
                expected_calls += 1
                wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
                terms = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
                wide = ROUNDING[dtype] if dtype == torch.float64 else ROUNDING[torch.float32]
                allowed = ROUNDING[dtype] * wanted.abs() + 16 * wide * terms
                assert y.dtype == dtype
                assert ((y.double() - wanted).abs() <= allowed).all(), (rows, features)
    assert len(calls) == expected_calls


@needs_kernels
def test_a_row_depends_on_nothing_else(calls):
    x, weight, bias = operands((32, 200), 75)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        together = ops.linear(x, weight, bias)
        try:
            torch.set_num_threads(1)
            alone = torch.cat([ops.linear(row[None], weight, bias) for row in x])
        finally:
            torch.set_num_threads(threads)
        strided = ops.linear(x.t().contiguous().t(), weight, bias)
    assert torch.equal(together, alone)
    assert torch.equal(together, strided)
    assert len(calls) == 34


@needs_kernels
def test_non_finite_numbers_stay_in_their_rows():
    x, weight, _ = operands((3, 21), 6)
    x[1, 20], weight[4, 2] = float("nan"), float("inf")
    with torch.inference_mode():
        y = ops.linear(x, weight)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]].isfinite().all(0), torch.arange(6) != 4)


@needs_kernels
def test_gives_way(calls):
    x, weight, bias = operands((3, 16), 8)
    many = operands((40, 16), 8)[0]
    with torch.no_grad():
        ops.linear(x, weight, bias)  # a pass that may be recomputed with gradients
    with torch.inference_mode():
        assert torch.equal(ops.linear(many, weight, bias), F.linear(many, weight, bias))
        transposed = weight.t().contiguous().t()
        assert torch.equal(ops.linear(x, transposed), F.linear(x, transposed))
        with torch.autocast("cpu", torch.bfloat16):
            assert ops.linear(x, weight, bias).dtype == torch.bfloat16
        with ops.kernels("reference"):
            assert torch.equal(ops.linear(x, weight, bias), F.linear(x, weight, bias))
        assert ops.linear(x[:0], weight).shape == (0, 8)
        with pytest.raises(RuntimeError):
            ops.linear(x, weight[:, :5].contiguous())
        with pytest.raises(RuntimeError):
            ops.linear(x.bfloat16(), weight)
    assert calls == []
    leaf = weight.requires_grad_()
    ops.linear(x, leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, x.sum(0).expand(8, -1))


def test_calls_past_the_dispatcher_are_the_same(zoo, case_name, variant):
    case = zoo.cases(5, 37)[case_name]
    through = case.run(variant, torch.float32)
    with torch.no_grad():
        past = case.run(variant, torch.float32, with_grad=False)
    for name, value in past.items():
        assert torch.equal(value, through[name]), name


def test_who_looks_at_a_call_sees_the_operator():
    x, weight = torch.randn(4, 3, 8), torch.rand(8)

    def norm(x):
        return ops.rms_norm(x, weight, 1e-6)

    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    with torch.no_grad():
        expected = norm(x)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert norm(mode.from_tensor(x)).shape == x.shape
        torch.testing.assert_close(torch.compile(norm, fullgraph=True, backend=backend)(x), expected)
        torch.testing.assert_close(torch.func.vmap(norm)(x), expected)
    assert any("shardzoo" in str(node.target) for node in graphs[0].graph.nodes)
