"""Matrix products and ReLUs on a CPU: PyTorch's results, and PyTorch's own way wherever somebody watches."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from every_case import every_day

from shardzoo import ops
from shardzoo.ops import library, linear, matmul, relu, variants
from shardzoo.ops.cpu import few_rows
from shardzoo.ops.cpu import products as cpu_products
from shardzoo.ops.cpu.pool import MIN_POOLED_BYTES

LARGE = 1 << 20  # elements


@pytest.fixture
def pooled(monkeypatch):
    """The sizes of the results that PyTorch's libraries wrote into the pool's memory."""
    monkeypatch.setattr(cpu_products, "_kernel_dtypes", tuple)
    monkeypatch.setattr(cpu_products, "_has_library", lambda dtype: True)
    seen, empty_pooled = [], cpu_products.empty_pooled

    def remember(like, *size):
        seen.append(size)
        return empty_pooled(like, *size)

    monkeypatch.setattr(cpu_products, "empty_pooled", remember)
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
        output,
        [x for x in leaves if x is not None],
        torch.randn(output.shape, generator=g).to(output.dtype),
    )
    return [output.detach(), *grads]


def assert_same_bits(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_attention_is_that_of_pytorch(dtype, pooled):
    """Up to the order of sums: another layout in memory is another kernel."""
    q, k, v = (heads(seed, dtype) for seed in range(3))
    scores = results(lambda q, k: matmul(q, k.mT), q, k)
    tolerance = {
        "rtol": 8 * torch.finfo(dtype).eps,
        "atol": 430 * torch.finfo(dtype).eps,
    }  # of sums of 430 terms
    torch.testing.assert_close(scores, results(lambda q, k: q @ k.mT, q, k), **tolerance)
    torch.testing.assert_close(
        results(matmul, scores[0], v), results(torch.matmul, scores[0], v), **tolerance
    )
    large = (2, 3, 430, 430)
    assert pooled == [large, large]  # the scores, and the gradient of the weights


@pytest.mark.parametrize("biased", every_day([True], more=[False]))
def test_linear_has_the_bits_of_pytorch(dtype, biased, pooled):
    g = torch.Generator().manual_seed(4)
    x, weight, bias = (
        torch.randn(*size, generator=g).to(dtype) for size in ((2, 900, 64), (1250, 64), (1250,))
    )
    for rows in (x, x.transpose(0, 1), x[0]):
        inputs = (rows, weight, bias if biased else None)
        pooled.clear()
        assert_same_bits(results(linear, *inputs), results(F.linear, *inputs))
        large = rows.numel() // 64 * 1250 * dtype.itemsize >= MIN_POOLED_BYTES and (
            rows.is_contiguous() or not biased
        )
        assert pooled == ([(*rows.shape[:-1], 1250)] if large else [])
    with torch.no_grad():
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


def test_relu_has_the_bits_of_pytorch(dtype):
    x = torch.randn(3, LARGE, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    x[1, :5] = 0.0
    for one, other in zip(results(relu, x), results(F.relu, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_only_the_gradients_that_are_wanted(pooled):
    x, weight = torch.randn(2048, 512), torch.randn(1024, 512, requires_grad=True)
    (grad,) = torch.autograd.grad(linear(x, weight, None).sum(), weight)
    assert grad.shape == weight.shape
    assert pooled == [(2048, 1024), (1024, 512)]  # the gradient of x is not there
    a = torch.randn(4, 512, 512)
    (grad,) = torch.autograd.grad(matmul(a.requires_grad_(), torch.randn(4, 512, 512)).sum(), a)
    assert pooled[2:] == [(4, 512, 512)] * 2


def test_heads_stay_where_they_are(pooled):
    """Neither is attention's output, nor are the gradients of q, k and v, copied into a layout of their own."""
    q, k, v = (torch.randn(2, 600, 8, 64).transpose(1, 2).requires_grad_() for _ in range(3))
    output = matmul(matmul(q, k.mT), v)
    for tensor in (output, *torch.autograd.grad(output, (q, k, v), torch.randn_like(output))):
        assert tensor.stride() == q.stride()


needs_kernels = pytest.mark.skipif(
    variants.unavailable("cpp", "cpu") is not None, reason="no compiled kernels"
)
ROUNDING = {
    torch.float32: 2**-24,
    torch.float64: 2**-53,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_kernel = pytest.mark.parametrize("kind", KERNEL_DTYPES, ids=str)


@pytest.fixture
def products(monkeypatch):
    """The sizes (rows, depth, columns) of the products that our kernel computes, here of any size, on any processor."""
    monkeypatch.setattr(cpu_products, "_kernel_dtypes", lambda: KERNEL_DTYPES)
    monkeypatch.setattr(cpu_products, "_min_product", lambda dtype: 1)
    seen, call = [], library.call_compiled

    def remember(name, *arguments):
        result = call(name, *arguments)
        if name == "matrix_product" and result is not None:
            seen.append((*arguments[0].shape, arguments[1].shape[1]))
        return result

    monkeypatch.setattr(library, "call_compiled", remember)
    return seen


def multiply(a, b, bias=None):
    return library.call_compiled("matrix_product", a, b, bias)


def factors(rows, depth, columns, kind, a_across=False, b_across=False):
    """a, b and a bias; the numbers of a's rows or columns are adjacent, and those of b's."""
    g = torch.Generator().manual_seed(rows + depth + columns)
    a, b, bias = (
        torch.randn(*size, generator=g).to(kind)
        for size in ((rows, depth), (depth, columns), (columns,))
    )
    return (
        a.t().contiguous().t() if a_across else a,
        b if b_across else b.t().contiguous().t(),
        bias,
    )


def assert_rounded_once(result, a, b, bias):
    """Each sum is within as many roundings of fp32 as it has terms (Higham 2002, section 3.1), and one of its type."""
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    allowed = ROUNDING[result.dtype] * exact.abs() + (a.shape[1] + 2) * 2**-24 * sizes
    smallest = (
        2**-25 if result.dtype == torch.float16 else 0
    )  # half of the step between its subnormal numbers
    assert ((result.double() - exact).abs() <= 1.01 * allowed + smallest).all()


@needs_kernels
@by_kernel
@pytest.mark.parametrize("a_across", [False, True])
@pytest.mark.parametrize("b_across", [False, True])
def test_the_kernel_rounds_once(kind, a_across, b_across):
    """Sizes about those of tiles, panels, blocks and parts, and odd depths, which leave half of a pair of bf16."""
    sizes = [
        (1, 1, 1),
        (7, 5, 3),
        (8, 64, 48),
        (9, 65, 49),
        (16, 2, 16),
        (17, 128, 33),
        (65, 129, 95),
        (129, 31, 193),
    ]
    sizes += [
        (130, 1023, 200),
        (33, 1024, 97),
        (20, 1025, 50),
        (40, 2501, 60),
        (1030, 40, 50),
        (30, 33, 3100),
    ]
    sizes += [(1100, 1100, 70), (70, 1100, 1600), (33, 768, 97), (20, 769, 49), (9, 1537, 47)]
    for size in sizes:
        a, b, bias = factors(*size, kind, a_across, b_across)
        assert_rounded_once(multiply(a, b), a, b, None)
        assert_rounded_once(multiply(a, b, bias), a, b, bias)


@needs_kernels
@pytest.mark.parametrize("amd", [True, False])
@pytest.mark.parametrize("kind", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("supported", [True, False])
def test_the_kernel_serves_types_that_pytorch_multiplies_slowly(kind, amd, supported, monkeypatch):
    """On every processor, and from smaller products on; where PyTorch has a library, large ones on AMD's alone."""
    monkeypatch.setattr(library, "is_amd_with_avx512_bf16", lambda: amd)
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: supported)
    for cached in (cpu_products._kernel_dtypes, cpu_products._types_without_library):
        monkeypatch.setattr(cpu_products, cached.__name__, cached.__wrapped__)
    seen, compute = [], cpu_products.multiply
    monkeypatch.setattr(
        cpu_products, "multiply", lambda a, b, bias: seen.append(compute(a, b, bias)) or seen[-1]
    )
    slow = not supported and kind != torch.float32
    for rows, ours in ((16, False), (512, slow), (4096, slow or amd)):
        x, weight = torch.randn(rows, 128).to(kind), torch.randn(64, 128).to(kind)
        seen.clear()
        linear(x, weight)
        assert sum(product is not None for product in seen) == ours


@needs_kernels
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_batches_of_a_type_without_library_are_rounded_once(kind, monkeypatch):
    """Both products and their gradients, within a rounding of fp64's: PyTorch multiplies them in fp32."""
    monkeypatch.setattr(cpu_products, "_has_library", lambda dtype: dtype != kind)
    monkeypatch.setattr(cpu_products, "_kernel_dtypes", lambda: (kind,))
    seen, multiply = [], cpu_products.compute_matmul
    monkeypatch.setattr(
        cpu_products, "compute_matmul", lambda a, b: seen.append(a.dtype) or multiply(a, b)
    )
    q, k, v, heads_grad = (heads(seed, kind) for seed in range(4))
    weights = torch.rand(2, 3, 430, 430, generator=torch.Generator().manual_seed(4)).to(kind)
    for a, b, grad in ((q, k.mT, weights), (weights, v, heads_grad)):
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        output = matmul(a, b)
        grads = torch.autograd.grad(output, (a, b), grad)
        x, y, z = a.double(), b.double(), grad.double()
        for actual, exact in zip((output, *grads), (x @ y, z @ y.mT, x.mT @ z), strict=True):
            assert actual.dtype == kind
            torch.testing.assert_close(
                actual.double(), exact, rtol=1.01 * ROUNDING[kind], atol=1e-4
            )
    assert seen.count(torch.float32) == 6


@needs_kernels
@by_kernel
def test_the_kernel_reads_parts_of_larger_matrices(kind):
    g = torch.Generator().manual_seed(1)
    whole = torch.randn(301, 303, generator=g).to(kind)
    for first in (0, 1):  # with an odd offset or stride, pairs of bf16 are not aligned
        for a in (
            whole[first:200, first:150],
            whole.t()[first:200, first:150],
            whole[::2, first : first + 100],
        ):
            b = whole[: a.shape[1], 3:90]
            assert_rounded_once(multiply(a, b), a, b, None)
    row = whole[:1, :150].expand(40, 150)
    assert torch.equal(multiply(row, whole[:150]), multiply(row.contiguous(), whole[:150]))


@needs_kernels
@by_kernel
def test_a_sum_depends_on_its_terms_alone(kind):
    """Neither on the other rows and columns, nor on the order of memory, nor on the threads."""
    a, b, bias = factors(300, 1100, 210, kind)
    threads, whole = torch.get_num_threads(), multiply(a, b, bias)
    try:
        for count in (1, 3, 4):
            torch.set_num_threads(count)
            assert torch.equal(multiply(a, b, bias), whole)
    finally:
        torch.set_num_threads(threads)
    for rows, columns in (
        (slice(0, 1), slice(0, 1)),
        (slice(5, 131), slice(0, 210)),
        (slice(0, 300), slice(17, 90)),
    ):
        assert torch.equal(multiply(a[rows], b[:, columns], bias[columns]), whole[rows, columns])
    assert torch.equal(multiply(a.t().contiguous().t(), b.contiguous(), bias), whole)


@needs_kernels
@by_kernel
def test_non_finite_numbers_of_a_product_stay_in_their_rows(kind):
    a, b, _ = factors(40, 77, 60, kind)
    a[3, 76], a[17, 0], b[2, 59] = float("nan"), float("inf"), float("inf")
    result = multiply(a, b).isfinite()
    expected = torch.ones(40, 60, dtype=torch.bool)
    expected[3], expected[17], expected[:, 59] = False, False, False
    assert torch.equal(result, expected)


@needs_kernels
def test_the_kernel_gives_way():
    a, b, bias = factors(20, 30, 40, torch.float32)
    assert multiply(a, b[:29]) is None
    assert multiply(a[:, ::2][:, ::2], b[:8]) is None  # no stride is 1
    assert multiply(a[:0], b) is None
    assert multiply(a[None], b[None]) is None
    assert multiply(a.double(), b.double()) is None
    assert multiply(a, b.bfloat16()) is None
    assert multiply(a, b, bias.bfloat16()) is None
    assert multiply(a, b, bias[:39]) is None
    assert multiply(a, b, bias[:1]) is None
    assert multiply(a, b, bias[None]) is None
    assert multiply(a, b, bias.repeat_interleave(2)[::2]) is None


@needs_kernels
@by_kernel
def test_products_of_a_layer_and_its_gradients_are_the_kernels(kind, products):
    g = torch.Generator().manual_seed(4)
    x, weight, bias = (
        torch.randn(*size, generator=g).to(kind) for size in ((2, 140, 96), (60, 96), (60,))
    )
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    wide = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    grad = torch.randn(2, 140, 60, generator=g).to(kind)
    output, exact = linear(*leaves), F.linear(*wide)
    found, true = (
        torch.autograd.grad(output, leaves, grad),
        torch.autograd.grad(exact, wide, grad.double()),
    )
    for own, other in zip((output, *found), (exact, *true), strict=True):
        assert own.dtype == kind
        torch.testing.assert_close(
            own.double(), other, rtol=2 * ROUNDING[kind], atol=1e-4 if own.dim() > 1 else 1
        )
    assert products == [(280, 96, 60), (280, 60, 96), (60, 280, 96)]
    a = x[0].clone().requires_grad_()
    matmul(a, weight.t()).sum().backward()
    assert products[3:] == [(140, 96, 60)]  # the gradient of a sum has no adjacent numbers
    wanted = weight.double().sum(0).expand(140, 96)
    torch.testing.assert_close(a.grad.double(), wanted, rtol=2 * ROUNDING[kind], atol=0.1)
    with torch.no_grad():
        assert torch.equal(linear(x, weight, bias), output)


@needs_kernels
def test_what_the_kernel_does_not_suit_is_pytorchs(products):
    x, weight = torch.randn(2, 700, 96), torch.randn(600, 96)
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    for bias in (torch.randn(1), torch.randn(1, 600), torch.randn(1200)[::2]):
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    with ops.kernels("reference"):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    with pytest.raises(RuntimeError):
        linear(x, weight[:, :95])
    assert products == []
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    assert products == [(1400, 96, 600)]


@needs_kernels
def test_pairs_of_bf16_survive_where_denormal_numbers_do_not():
    """A pair whose second number is 0 is a denormal float."""
    a, b, _ = factors(40, 64, 50, torch.bfloat16)
    a[:, 1::2] = 0
    q = a[None, None, :32]
    threads, wanted, mixed = (
        torch.get_num_threads(),
        multiply(a, b),
        ops.attention(q, q, q, scale=0.1),
    )
    torch.set_num_threads(1)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormal numbers")
        assert torch.equal(multiply(a, b), wanted)
        assert torch.equal(ops.attention(q, q, q, scale=0.1), mixed)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def test_gradients_of_complex_numbers_and_forward_ones():
    g = torch.Generator().manual_seed(4)
    x, weight = (
        torch.randn(*size, generator=g, dtype=torch.complex64) for size in ((512, 512), (512, 512))
    )
    assert_same_bits(results(linear, x, weight, None), results(F.linear, x, weight, None))
    assert_same_bits(results(matmul, x, weight), results(torch.matmul, x, weight))
    x, weight, tangent = x.real.contiguous(), weight.real.contiguous(), weight.imag.contiguous()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(linear(dual, weight, None)).tangent
    assert torch.equal(found, F.linear(tangent, weight))


def test_small_results_are_pytorchs(pooled):
    x, weight = torch.randn(5, 7, requires_grad=True), torch.randn(3, 7)
    assert type(linear(x, weight, None).grad_fn).__name__ != "_LinearBackward"
    assert type(matmul(x, weight.t()).grad_fn).__name__ == "MmBackward0"
    assert linear(x[0], weight, None).shape == (3,)
    assert matmul(torch.zeros(2, 0, 5), torch.zeros(2, 5, 4)).shape == (2, 0, 4)
    assert pooled == []


def test_nobody_who_looks_is_passed_by(pooled):
    """Autocast, function transforms, the compiler."""
    x, weight = torch.randn(2048, 512), torch.randn(1024, 512)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, None).dtype == torch.bfloat16
    per_row = torch.vmap(linear, in_dims=(0, None, None))(x.view(2, 1024, 512), weight, None)
    torch.testing.assert_close(per_row.flatten(0, 1), F.linear(x, weight))
    tangents = torch.func.jvp(lambda x: linear(x, weight, None), (x,), (x,))
    torch.testing.assert_close(*tangents)
    compiled = torch.compile(lambda x: matmul(x, x.mT), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x @ x.mT)
    assert pooled == []


@needs_kernels
@by_kernel
def test_compiled_code_has_the_products_of_plain_code(kind, products):
    g = torch.Generator().manual_seed(4)
    x, weight, bias = (
        torch.randn(*size, generator=g).to(kind) for size in ((2, 140, 96), (60, 96), (60,))
    )
    for inputs in ((x, weight, bias), (x.transpose(0, 1), weight, None), (x[0], weight, bias)):
        products.clear()
        expected, plain = results(linear, *inputs), products.copy()
        assert_same_bits(results(compiled(linear), *inputs), expected)
        assert products == plain * 2
        assert len(plain) == 3
    for a, b in ((x[0], weight.t()), (x[0], weight.t().contiguous()), (x[0].t(), x[1])):
        assert_same_bits(results(compiled(matmul), a, b), results(matmul, a, b))


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("kinds", [(), pytest.param(KERNEL_DTYPES, marks=needs_kernels)])
def test_compiled_products_that_the_kernel_does_not_suit_are_pytorchs(monkeypatch, kinds):
    """Small ones, other processors' and types', under autocast. To ask for the processor is not traced."""
    monkeypatch.setattr(cpu_products, "_kernel_dtypes", functools.cache(lambda: kinds))
    x, weight, bias = torch.randn(256, 300), torch.randn(300, 300), torch.randn(300)
    others = [(256, torch.float64), (256, torch.complex64), (8, torch.float32)]
    for rows, kind in others if kinds else [*others, (256, torch.float32)]:
        inputs = [
            tensor.to(kind) * (1 - 1j if kind.is_complex else 1)
            for tensor in (x[:rows], weight, bias)
        ]
        assert_same_bits(results(compiled(linear), *inputs), results(F.linear, *inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(results(compiled(linear), x, weight), results(F.linear, x, weight))


@pytest.mark.parametrize("biased", [True, False])
def test_the_operator_of_compiled_products_is_one_of_pytorchs(biased, products):
    a, b, bias = (torch.randn(*size, requires_grad=True) for size in ((7, 5), (5, 9), (9,)))
    torch.library.opcheck(torch.ops.shardzoo.product.default, (a, b, bias if biased else None))


@pytest.mark.parametrize("kinds", [(), pytest.param(KERNEL_DTYPES, marks=needs_kernels)])
def test_counting_changes_no_bit(monkeypatch, kinds):
    """The trainer counts a process's first step, which in a resumed run is one that was not counted before."""
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(cpu_products, "_kernel_dtypes", lambda: kinds)
    q, k, v = (heads(seed, torch.float32) for seed in range(3))
    x, weight = torch.randn(2048, 512), torch.randn(1024, 512)
    calls = ((matmul, q, k.mT), (matmul, torch.rand(2, 3, 430, 430), v), (linear, x, weight, None))
    for call in calls:
        expected = results(*call)
        with FlopCounterMode(display=False) as counter:
            counted = results(*call)
        assert_same_bits(counted, expected)
        a, b = call[1:3]
        columns = b.shape[0] if call[0] is linear else b.shape[-1]
        assert counter.get_total_flops() == 3 * 2 * a.numel() * columns


@pytest.mark.skipif(library.load_error() is not None, reason="the pool is a compiled part")
def test_memory_is_used_again(pooled):
    x, weight = torch.randn(1024, 64, requires_grad=True), torch.randn(2048, 64)
    first = ops.linear(x, weight)
    place, kept = first.data_ptr(), first.detach().clone()
    del first
    second = ops.linear(x, weight)
    assert second.data_ptr() == place
    third = ops.linear(x, weight)
    assert third.data_ptr() != place
    assert torch.equal(second, kept)


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the products that the kernel does."""
    seen, call = [], library.call_compiled

    def remember(name, x, *arguments):
        result = call(name, x, *arguments)
        if result is not None:
            seen.append(tuple(x.shape))
        return result

    monkeypatch.setattr(library, "call_compiled", remember)
    return seen


def operands(shape, features, dtype=torch.float32):
    """x of a shape [..., C], weight and bias."""
    g = torch.Generator().manual_seed(features)
    sizes = (shape, (features, shape[-1]), (features,))
    return [torch.randn(*size, generator=g, dtype=torch.float64).to(dtype) for size in sizes]


@needs_kernels
@pytest.mark.parametrize("columns", [1, 7, 16, 37, 130])
def test_few_rows_match_fp64(columns, dtype, calls):
    expected_calls = 0
    for rows in (1, 2, 3, 4, 5, 7, 8, *((13, 16) if few_rows.max_gemv_rows(dtype) > 8 else ())):
        for features in (1, 3, 8, 29):
            x, weight, bias = operands((rows, 1, columns), features, dtype)
            for added in (bias, None):
                with torch.inference_mode():
                    y = ops.linear(x, weight, added)
                expected_calls += 1
                wanted = F.linear(
                    x.double(), weight.double(), None if added is None else added.double()
                )
                terms = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
                wide = ROUNDING[dtype] if dtype == torch.float64 else ROUNDING[torch.float32]
                allowed = ROUNDING[dtype] * wanted.abs() + 16 * wide * terms
                assert y.dtype == dtype
                assert ((y.double() - wanted).abs() <= allowed).all(), (rows, features)
    assert len(calls) == expected_calls


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "most"), [(torch.float32, 32), (torch.bfloat16, 8), (torch.float16, 8)], ids=str
)
def test_a_row_depends_on_nothing_else(kind, most, calls):
    x, weight, bias = operands((most, 200), 75, kind)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        together = ops.linear(x, weight, bias)
        try:
            torch.set_num_threads(1)
            alone = torch.cat([ops.linear(row[None], weight, bias) for row in x])
        finally:
            torch.set_num_threads(threads)
        strided = ops.linear(x.t().contiguous().t(), weight, bias)
        fewer = {rows: ops.linear(x[:rows], weight, bias) for rows in (2, 3, 5, 8)}
    assert torch.equal(together, alone)
    assert torch.equal(together, strided)
    assert all(torch.equal(together[:rows], some) for rows, some in fewer.items())
    assert len(calls) == most + 6


@needs_kernels
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_non_finite_numbers_stay_in_their_rows(kind):
    x, weight, _ = operands((3, 21), 6, kind)
    x[1, 20], weight[4, 2] = float("nan"), float("inf")
    with torch.inference_mode():
        y = ops.linear(x, weight)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]].isfinite().all(0), torch.arange(6) != 4)


@needs_kernels
def test_the_kernel_for_few_rows_gives_way(calls):
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


def test_the_arguments_of_a_layer_are_cast_as_torch_casts_them():
    from shardzoo.ops import autocast_arguments

    wide, single = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2)
    assert [t.dtype for t in autocast_arguments(wide, single)] == [torch.float64, torch.float32]
    with torch.autocast("cpu", torch.bfloat16):
        for tensor in (wide, single):
            ours, none = autocast_arguments(tensor, None)
            assert ours.dtype == torch.nn.functional.linear(tensor, tensor).dtype
            assert none is None
