"""The operators as torch sees them: opcheck, `out` forms, torch.compile, dispatch, and user errors."""

from __future__ import annotations

import logging

import pytest
import torch
from every_case import by_turns, every_day
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shardzoo import ops
from shardzoo.ops import library, variants
from shardzoo.ops.bench.cases import cases
from shardzoo.ops.registration import OPS

SMALL = {case.name: case for case in cases("cpu", 1 / 2048)}
BENCHED = pytest.mark.parametrize("name", SMALL)
OPCHECKED = pytest.mark.parametrize("name", by_turns(SMALL, 8))
# Gradient formulas and traces are the same whatever kernel runs; Triton's interpreter would take long over them.
OPCHECKS = {"triton": ("test_schema", "test_faketensor")}
EVERY_OPCHECK = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def forward_and_backward(name, dtype=torch.float32):
    """[(operator's name, its arguments)] of a benchmark case at a small size."""
    case = SMALL[name]
    whole = case.make("cpu", dtype)
    tensors = {key: shrink(tensor) for key, tensor in whole.items()}
    if name == "attention_bias":  # a number for each distance between 24 queries and 24 keys
        tensors["bias"] = whole["bias"][:3, :47].contiguous()
    op, arguments = case.forward
    inputs = arguments(tensors)
    outputs = getattr(torch.ops.shardzoo, op)(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    shape = tensors["x"].shape if name != "cross_entropy" else tensors["x"].shape[:1]
    cotangent = torch.ones(shape, dtype=torch.float32 if name == "cross_entropy" else dtype)
    back, back_arguments = case.backward
    return [(op, inputs), (back, back_arguments(tensors, outputs, cotangent))]


def shrink(tensor):
    """At most 3 heads, 24 queries or rows, and 40 columns of a benchmark tensor."""
    limits = {4: (1, 3, 24, 40), 3: (8, 3, 40), 2: (6, 40), 1: (40,)}[tensor.dim()]
    if tensor.dtype == torch.int64:
        return tensor[:6] % 40 if tensor.numel() > 8 else tensor
    return tensor[tuple(slice(limit) for limit in limits)].clone().contiguous()


@OPCHECKED
def test_opcheck(name, variant):
    with ops.kernels(variant):
        for op, arguments in forward_and_backward(name):
            leaves = not op.endswith(
                ("_backward", "_stats", "_grad")
            )  # these have no gradient of their own
            differentiable = [
                a.detach().requires_grad_(leaves)
                if isinstance(a, torch.Tensor) and a.is_floating_point()
                else a
                for a in arguments
            ]
            overload = getattr(torch.ops.shardzoo, op).default
            torch.library.opcheck(
                overload, tuple(differentiable), test_utils=OPCHECKS.get(variant, EVERY_OPCHECK)
            )


@OPCHECKED
def test_opcheck_of_out_forms(name, variant):
    with ops.kernels(variant):
        for op, arguments in forward_and_backward(name):
            arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
            outputs = OPS[op].allocate(*arguments)
            named = {
                key: value.zero_() for key, value in zip(OPS[op].outputs, outputs, strict=True)
            }
            overload = getattr(torch.ops.shardzoo, f"{op}_out").default
            torch.library.opcheck(
                overload, arguments, named, test_utils=OPCHECKS.get(variant, EVERY_OPCHECK)
            )


def test_opcheck_of_the_whole_loss(variant):
    logits = torch.randn(6, 40, requires_grad=True)
    target = torch.tensor([0, 39, -100, 5, 5, 7])
    with ops.kernels(variant):
        torch.library.opcheck(
            torch.ops.shardzoo.cross_entropy.default, (logits, target, 0.1, 0.01, -100)
        )
        settings = (0, 40, 40, 0.0, 0.0, -100)
        arguments = (logits.detach(), target, torch.ones(6), torch.ones(6), *settings)
        torch.library.opcheck(torch.ops.shardzoo.cross_entropy_grad_.default, arguments)


@pytest.mark.parametrize("name", by_turns(SMALL, 3))
@pytest.mark.parametrize(
    "floats", every_day([torch.bfloat16], more=[torch.float32, torch.float16, torch.float64])
)
def test_out_overwrites_everything(name, variant, floats):
    """Outputs filled with NaN before hold exactly what the allocating form returns."""
    with ops.kernels(variant):
        for op, arguments in forward_and_backward(name, floats):
            expected = getattr(torch.ops.shardzoo, op)(*arguments)
            expected = expected if isinstance(expected, tuple) else (expected,)
            outputs = {
                key: torch.full_like(value, float("nan"))
                for key, value in zip(OPS[op].outputs, expected, strict=True)
            }
            getattr(torch.ops.shardzoo, f"{op}_out")(*arguments, **outputs)
            for value, wanted in zip(outputs.values(), expected, strict=True):
                assert torch.equal(value, wanted), op


def test_out_may_have_another_layout(variant):
    x = torch.randn(4, 8)
    y = torch.full((8, 4), float("nan")).t()
    with ops.kernels(variant):
        torch.ops.shardzoo.bias_gelu_out(x, None, False, y=y)
    torch.testing.assert_close(y, torch.nn.functional.gelu(x))


def test_out_refuses_a_wrong_shape():
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"bias_gelu_out writes `y` as \(4, 8\)"):
        torch.ops.shardzoo.bias_gelu_out(x, None, False, y=torch.empty(4, 7))


def test_gradient_over_the_logits(variant, dtype):
    logits, target = torch.randn(9, 50).to(dtype), torch.arange(9) * 5
    target[3] = -100
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grad, log_z = torch.rand(9, dtype=wide), logits.to(wide).logsumexp(-1)
    settings = {"first": 0, "columns": 47, "num_classes": 47}
    with ops.kernels(variant):
        expected = ops.cross_entropy_grad(logits, target, grad, log_z, **settings)
        result = ops.cross_entropy_grad(logits, target, grad, log_z, **settings, in_place=True)
    assert result is logits
    assert torch.equal(logits, expected)
    assert not expected[:, 47:].any()
    assert not expected[3].any()


def test_compiles_without_graph_breaks():
    def block(x, weight, bias, scores):
        h = ops.rms_norm(x, weight, 1e-6)
        return ops.bias_gelu(h, bias).sum() + ops.masked_softmax(scores, causal=True).square().sum()

    tensors = [
        torch.randn(*shape, requires_grad=True)
        for shape in ((4, 6, 16), (16,), (16,), (1, 2, 5, 5))
    ]
    expected = torch.autograd.grad(block(*tensors), tensors)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(torch.autograd.grad(compiled(*tensors), tensors), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_tracers_and_subclasses_see_the_operator():
    """A call goes around torch's dispatcher only where nothing is to see it there."""

    def loss(x):
        return ops.bias_gelu(x).square().sum()

    x = torch.randn(3, 8)
    names = [str(node.target) for node in make_fx(loss)(x).graph.nodes]
    assert "shardzoo.bias_gelu.default" in names
    leaf = x.clone().requires_grad_()
    with FakeTensorMode() as mode:
        assert isinstance(ops.bias_gelu(mode.from_tensor(leaf)), FakeTensor)
    assert ops.bias_gelu(x.to("meta")).is_meta
    seen = []

    class Monitored(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs)

    ops.bias_gelu(x.as_subclass(Monitored))
    assert "shardzoo.bias_gelu.default" in seen


def test_dispatch(set_kernels):
    set_kernels("reference")
    assert variants.choose_variant("cpu") == "reference"
    with ops.kernels("auto"):
        assert ops.current_choice() == "auto"
        with ops.kernels("reference"):
            assert ops.current_choice() == "reference"
    with (
        ops.kernels("cuda"),
        pytest.raises(RuntimeError, match="cuda kernels do not run on cpu tensors"),
    ):
        ops.bias_gelu(torch.ones(3))
    with pytest.raises(ValueError, match="'fast' do not exist; use one of auto, reference"):
        ops.kernels("fast").__enter__()
    set_kernels("nonsense")
    with pytest.raises(ValueError, match="'nonsense'"):
        ops.bias_gelu(torch.ones(3))


@pytest.mark.skipif(
    not library.emulates_cuda(), reason="test_cuda_emulation.py runs this with its own library"
)
def test_library_that_emulates_cuda_runs_its_kernels_on_cpu_tensors():
    x = torch.randn(2, 8)
    with ops.kernels("cuda"):
        assert variants.choose_variant("cpu") == "cuda"
        torch.testing.assert_close(ops.bias_gelu(x), torch.nn.functional.gelu(x))
    with ops.kernels("auto"):
        assert variants.choose_variant("cpu") == "reference"
    with (
        ops.kernels("cpp"),
        pytest.raises(RuntimeError, match="runs its CUDA kernels on CPU tensors"),
    ):
        ops.bias_gelu(x)


def test_choice_is_logged_once(caplog):
    variants._best_variant.cache_clear()
    with caplog.at_level(logging.INFO, "shardzoo.ops"), ops.kernels("reference"):
        ops.bias_gelu(torch.ones(3))
        ops.bias_gelu(torch.ones(3))
    assert [record.message for record in caplog.records] == ["kernels on cpu: reference (forced)"]


def test_mixed_dtypes_run_on_the_reference():
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.rand(8)
    wanted = ops.rms_norm(x.double(), weight.double(), 1e-6)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6).double(), wanted, rtol=2**-6, atol=0)


def errors():
    """(call, what its message names)"""
    x, keys = torch.ones(2, 3, 4), torch.zeros(2, dtype=torch.int64)
    scores = torch.ones(2, 3, 4, 5)
    return {
        "scores": (lambda: ops.masked_softmax(x), r"\[B, N, Sq, Sk\], got shape \(2, 3, 4\)"),
        "prefix": (lambda: ops.masked_softmax(scores, prefix=keys), "needs causal=True"),
        "devices": (
            lambda: ops.rms_norm(x, torch.ones(4, device="meta"), 1e-6),
            "rms_norm got tensors on cpu and on meta; use one device",
        ),
        "mask": (
            lambda: ops.masked_softmax(scores, torch.ones(4, 4) > 0),
            r"\(4, 4\) does not broadcast",
        ),
        "integer mask": (
            lambda: ops.masked_softmax(scores, torch.ones(4, 5, dtype=torch.int64)),
            "must be boolean",
        ),
        "softmax keys": (lambda: ops.masked_softmax(scores, dropout=0.1), "needs int64 `keys`"),
        "p": (lambda: ops.dropout(x, 1.0, keys), "less than 1, got 1.0"),
        "keys": (lambda: ops.dropout(x, 0.5, keys[:1]), r"shape \(2,\); got shape \(1,\)"),
        "no keys": (lambda: ops.dropout(x, 0.5, None), "got none"),
        "bias": (lambda: ops.bias_gelu(x, torch.ones(3)), r"shape \(4,\), got \(3,\)"),
        "gelu": (lambda: ops.bias_gelu(x, approximate="erf"), "'none' or 'tanh', got 'erf'"),
        "glu": (lambda: ops.swiglu(x, x[:1]), "same shape"),
        "norm": (lambda: ops.rms_norm(x, torch.ones(3), 1e-6), r"got \(3,\)"),
        "residual": (lambda: ops.add_rms_norm(x, x[:1], torch.ones(4), 1e-6), "same shape"),
        "target": (
            lambda: ops.cross_entropy(x[0], torch.zeros(4, dtype=torch.int64)),
            r"target \[T\]",
        ),
        "columns": (lambda: ops.cross_entropy_stats(x[0], keys, 0, 5), r"0\.\.4, got 5|target"),
    }


@pytest.mark.parametrize("name", errors())
def test_user_errors(name):
    call, message = errors()[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "offset_rms_norm"])
def test_sums_of_a_norm_are_rounded_once(variant, name):
    """Narrow sums, which no ranks add, are the wide ones rounded."""
    grad, h = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight, rows = torch.linspace(0.5, 2.0, 24).bfloat16(), torch.linspace(0.9, 1.1, 40)
    settings = {
        "layer_norm": (rows - 1, rows, True),
        "rms_norm": (rows,),
        "offset_rms_norm": (rows, 1.0),
    }[name]
    operator = OPS[f"{name}_backward"]
    with ops.kernels(variant):
        _, *wide = operator(grad, None, h, weight, *settings, True)
        _, *narrow = operator(grad, None, h, weight, *settings, False)
    assert {x.dtype for x in wide} == {torch.float32}
    for expected, found in zip(wide, narrow, strict=True):
        assert torch.equal(found.float(), expected.bfloat16().float())
        assert found.dtype == torch.bfloat16


def test_outputs_without_a_gradient(variant):
    """Only one of two outputs is used: the other has no gradient, which is not the same as a zero tensor."""
    x, residual, weight = (
        torch.randn(*shape, requires_grad=True) for shape in ((3, 8), (3, 8), (8,))
    )
    for only in (0, 1):
        with ops.kernels(variant):
            outputs = ops.add_rms_norm(x, residual, weight, 1e-6)
            grad = torch.autograd.grad(outputs[only].sum(), residual)[0]
        with ops.kernels("reference"):
            wanted = torch.autograd.grad(
                ops.add_rms_norm(x, residual, weight, 1e-6)[only].sum(), residual
            )[0]
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, torch.ones(3, 8))


def test_narrow_integers_are_read_right(variant):
    logits, target = torch.randn(4, 9), torch.tensor([8, 0, 3, -100])
    scores, prefix = torch.randn(2, 1, 3, 5), torch.tensor([2, 0])
    with ops.kernels(variant):
        assert torch.equal(
            ops.cross_entropy(logits, target.int()), ops.cross_entropy(logits, target)
        )
        narrow = ops.masked_softmax(scores, causal=True, prefix=prefix.int())
        assert torch.equal(narrow, ops.masked_softmax(scores, causal=True, prefix=prefix))


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
        torch.testing.assert_close(
            torch.compile(norm, fullgraph=True, backend=backend)(x), expected
        )
        torch.testing.assert_close(torch.func.vmap(norm)(x), expected)
    assert any("shardzoo" in str(node.target) for node in graphs[0].graph.nodes)


def test_cases_of_a_device_stay_there(zoo, case_name):
    """On a GPU, tests/ops/test_gpu.py moves a case's tensors, and nothing of it may be left behind."""
    case = zoo.cases(4, 6)[case_name]
    moved = {
        name: tensor.to("meta") if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in case.tensors.items()
    }
    case = zoo.Case(case.function, moved, case.differentiable, case.constants)
    results = case.run("reference", torch.float32)
    assert {value.device.type for value in results.values()} == {"meta"}
