"""The operators of a decoding step (csrc/matmul/few_rows.h), which run only in inference mode.

`tests/ops/test_matmul.py` has the linear layer's. The others run the kernels of `attention` and of the norms, which are
held against fp64 elsewhere, so here they must give the same bits.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from every_case import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from shardzoo import mpu, ops
from shardzoo.models.blocks.attention import CoreAttention
from shardzoo.models.parallel_config import ParallelConfig
from shardzoo.ops import library, variants
from shardzoo.ops.cpu import few_rows

pytestmark = pytest.mark.skipif(
    variants.unavailable("cpp", "cpu") is not None, reason="no compiled kernels"
)
SHORT = (torch.float32, torch.bfloat16, torch.float16)
counts = st.integers(1, 4)


@pytest.fixture
def results(monkeypatch):
    """`results(name)`: how many calls of a compiled operator returned something."""
    seen, call = [], library.call_compiled

    def remember(name, *arguments):
        result = call(name, *arguments)
        if (result[0] if isinstance(result, tuple) else result) is not None:
            seen.append(name)
        return result

    monkeypatch.setattr(library, "call_compiled", remember)
    return seen.count


def norm_of(kind, size, dtype):
    norm = {
        "LayerNorm": mpu.LayerNorm(size),
        "LayerNorm without bias": mpu.LayerNorm(size, bias=False),
        "RMSNorm": mpu.RMSNorm(size),
    }[kind]
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm.to(dtype)


@pytest.mark.parametrize("kind", ["LayerNorm", "LayerNorm without bias", "RMSNorm"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 37), (3, 2, 64), (7, 129)])
def test_norm(kind, shape, dtype, results):
    norm = norm_of(kind, shape[-1], dtype)
    x, residual = torch.randn(2, *shape).to(dtype)
    for arguments in ((x,), (x, residual)):
        with torch.no_grad():
            expected = norm(*arguments, return_residual=True)
        with torch.inference_mode():
            y, h = norm(*arguments, return_residual=True)
            assert torch.equal(norm(*arguments), y)
        assert torch.equal(y, expected[0])
        assert torch.equal(h, expected[1])
        assert y.is_contiguous()
    assert results("norm_of_few_rows") == 4


def test_norm_that_others_compute(results):
    norm = norm_of("RMSNorm", 512, torch.float32)
    short = torch.randn(2, 512, dtype=torch.bfloat16)
    with torch.inference_mode():
        large, wide = torch.randn(129, 512), torch.randn(512, 3).t()
        assert torch.equal(norm(large)[:5], norm(large[:5]))
        assert torch.equal(norm(wide), norm(wide.contiguous()))
        torch.testing.assert_close(norm(short).float(), norm(short.float()), rtol=0.02, atol=0.02)
        assert norm(torch.empty(0, 512)).shape == (0, 512)
        with pytest.raises(ValueError, match="512 features"):
            norm(torch.randn(3, 511))
        with ops.kernels("reference"):
            norm(large[:5])
        with torch.autocast("cpu", torch.bfloat16):
            norm(large[:5])
    assert results("norm_of_few_rows") == 3


@st.composite
def problems(draw):
    """q, k and v as views of a fused projection and of a cache, and a mask."""
    batch, groups, served, queries, more = (draw(counts) for _ in range(5))
    size, capacity = draw(st.sampled_from((3, 16, 40, 64, 130))), 70
    heads, keys = groups * served, queries + draw(st.integers(0, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    projected = torch.randn(batch, queries, heads + more, size, generator=generator)
    cache = torch.randn(2, batch, groups, capacity, size, generator=generator)
    shape = [full if draw(st.booleans()) else 1 for full in (batch, heads, queries, keys)]
    mask = None
    if kind := draw(st.sampled_from(("", "bool", "added"))):
        mask = torch.randn(shape, generator=generator)
        mask = mask > -0.5 if kind == "bool" else mask
    return (
        projected[:, :, :heads].transpose(1, 2),
        *cache[:, :, :, :keys],
        mask,
        draw(st.booleans()),
    )


@settings(max_examples=examples(150), deadline=None)
@given(problem=problems(), kind=st.sampled_from(SHORT), softcap=st.sampled_from([None, 0.7]))
def test_attention(problem, kind, softcap):
    q, k, v, mask, causal = problem
    q, k, v = (x.to(kind) for x in (q, k, v))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(kind)
    rules = {"scale": 0.3, "softcap": softcap}
    expected = ops.attention(q, k, v, mask=mask, causal=causal, **rules)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_rows, "MIN_FEW_KEYS", 0)
        result = ops.few_queries_attention(q, k, v, mask, causal, None, **rules)
    assert torch.equal(result, expected)
    assert result.transpose(1, 2).is_contiguous()  # merging the heads copies nothing


def test_attention_that_others_compute():
    q, k = torch.randn(2, 4, 1, 8).bfloat16(), torch.randn(2, 4, 9, 8).bfloat16()

    def attend(q=q, k=k, v=None, mask=None, prefix=None):
        return ops.few_queries_attention(
            q, k, k if v is None else v, mask, False, prefix, scale=1.0
        )

    assert attend() is None  # it has no gradient
    with torch.inference_mode():
        assert attend() is not None
        assert attend(q.float(), k.float()) is None  # few keys in fp32
        assert attend(q.double(), k.double()) is None
        assert attend(k, k) is None  # nine queries
        assert attend(q, k[:, :3]) is None
        assert attend(q, k, k[:, :, :8]) is None
        assert attend(q, k, k.half()) is None
        assert attend(q, k[:, :, :0]) is None
        assert attend(mask=torch.zeros(1, 1, 1, 8).bfloat16()) is None
        assert attend(mask=torch.zeros(1, 1, 1, 9)) is None  # fp32
        assert attend(mask=torch.ones(1, 9).bool()) is None  # two dimensions
        assert attend(prefix=torch.ones(2).long()) is None
        assert (
            attend(torch.randn(2, 4, 8, 1).bfloat16().mT, k) is not None
        )  # one row has adjacent numbers anyway
        assert attend(torch.randn(2, 4, 8, 2).bfloat16().mT, k) is None
        with ops.kernels("reference"):
            assert attend() is None
        with torch.autocast("cpu", torch.bfloat16):
            assert attend() is None


def test_nothing_of_a_gpu_decodes_here():
    """A stand-in for a CUDA tensor, for which the operators have no kernels."""
    here, there = (SimpleNamespace(is_cpu=cpu, is_cuda=not cpu) for cpu in (True, False))
    with torch.inference_mode():
        assert few_rows.may_decode(here)
        assert not few_rows.may_decode(there)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["linear", "LayerNorm", "RMSNorm", "attention"])
def test_a_compiler_traces_the_layers(kind, mode):
    """As one graph, which must not ask what only an eager call can."""
    attend = CoreAttention(
        2, 2, scale=0.5, dropout=0.0, mesh=None, parallel_config=ParallelConfig()
    )
    functions = {
        "linear": lambda x: ops.linear(x, torch.ones(3, 8)),
        "attention": lambda x: attend(x[None], x[None], x[None], None, None, True),
    }
    function = functions.get(kind) or norm_of(kind, 8, torch.float32)
    x = torch.randn(2, 5, 8)
    with mode():
        compiled = torch.compile(function, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, function(x))


def test_linear_that_others_compute(results):
    x, weight = torch.randn(2, 4, 8)
    with torch.inference_mode():
        column = torch.randn(4, 1)
        assert torch.equal(ops.linear(x, weight, column), F.linear(x, weight, column))
        with pytest.raises(RuntimeError):
            ops.linear(x, weight, torch.randn(2, 2))
        torch.testing.assert_close(ops.linear(x, weight.to_sparse()), F.linear(x, weight))
        assert ops.linear(x.int(), weight.int()).dtype == torch.int32
        ops.linear(x, weight)
    assert results("linear_of_few_rows") == 1
