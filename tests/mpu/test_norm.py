"""The norms against torch and transformers, and their parameters' gradients on a split sequence."""

from __future__ import annotations

import pytest
import torch
from every_case import every_day
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from shardzoo.mpu import LayerNorm, RMSNorm
from shardzoo.ops import kernels


def reference(kind, hidden):
    return (
        nn.RMSNorm(hidden, 1e-6)
        if kind == "rms"
        else nn.LayerNorm(hidden, 1e-6, bias=kind == "layer")
    )


def build(kind, hidden, **options):
    if kind == "rms":
        return RMSNorm(hidden, 1e-6, **options)
    return LayerNorm(hidden, 1e-6, bias=kind == "layer", **options)


def normalise(mesh, build, kind, state, x, grad, sequence_parallel, dtype=torch.float32):
    layer = build(kind, x.shape[-1], sequence_parallel=sequence_parallel, mesh=mesh).to(dtype)
    layer.load_state_dict(state)
    if sequence_parallel:
        x, grad = (t.chunk(mesh.tp_size, 1)[mesh.tp_rank] for t in (x, grad))
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(grad)
    return output.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}


def random_case(kind, batch, positions, hidden, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, grad = (
        torch.randn(batch, positions, hidden, generator=generator, dtype=dtype) for _ in range(2)
    )
    layer = reference(kind, hidden).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    return x, grad, layer


@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms"])
@given(batch=st.integers(0, 3), positions=st.integers(1, 5), hidden=st.integers(2, 9))
def test_equals_torch(kind, batch, positions, hidden):
    """In fp64, where a difference is a difference of formulas and not of roundings."""
    x, grad, theirs = random_case(kind, batch, positions, hidden, torch.float64)
    output, x_grad, grads = normalise(
        None, build, kind, theirs.state_dict(), x, grad, False, torch.float64
    )
    x.requires_grad_()
    expected = theirs(x)
    expected.backward(grad)
    tight = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(output, expected.detach(), **tight)
    torch.testing.assert_close(x_grad, x.grad, **tight)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, **tight)


@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms"])
@pytest.mark.parametrize("tp", every_day([2, 3], more=[1, 4]))
def test_a_split_sequence_changes_nothing(tp, kind, run_mesh, helpers):
    @given(
        batch=st.integers(0, 3),
        positions=st.integers(1, 3),
        hidden=st.integers(2, 9),
        sequence_parallel=st.booleans(),
    )
    @example(batch=2, positions=2, hidden=5, sequence_parallel=True)
    def check(batch, positions, hidden, sequence_parallel):
        x, grad, theirs = random_case(kind, batch, positions * tp, hidden)
        state = theirs.state_dict()
        output, x_grad, grads = normalise(None, build, kind, state, x, grad, False)
        results = run_mesh(tp, normalise, build, kind, state, x, grad, sequence_parallel)
        for rank, (own_output, own_x_grad, own_grads) in enumerate(results):
            mine = [t.chunk(tp, 1)[rank] if sequence_parallel else t for t in (output, x_grad)]
            helpers.close(own_output, mine[0])
            helpers.close(own_x_grad, mine[1])
            for name, expected in grads.items():
                helpers.close(own_grads[name], expected)

    check()


def with_residual(mesh, build, kind, state, tensors, residual, used, sequence_parallel):
    """Returns the norm of x (+ residual), what it was computed from, and all gradients of both."""
    layer = build(
        kind, tensors[0].shape[-1], sequence_parallel=sequence_parallel, mesh=mesh
    ).double()
    layer.load_state_dict(state)
    if sequence_parallel:
        tensors = [t.chunk(mesh.tp_size, 1)[mesh.tp_rank] for t in tensors]
    x, other, grad, grad_h = (t.clone() for t in tensors)
    leaves = [x.requires_grad_(), *([other.requires_grad_()] if residual else [])]
    y, h = layer(*leaves, return_residual=True)
    outputs = {"both": [(y, grad), (h, grad_h)], "norm": [(y, grad)], "h": [(h, grad_h)]}[used]
    torch.autograd.backward(*zip(*outputs, strict=True))
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    parameters = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    return [y.detach(), h.detach(), *grads], parameters


@pytest.mark.parametrize("used", ["both", "norm", "h"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms"])
def test_a_returned_residual_gets_its_gradient(kind, residual, used, run_mesh):
    """Against torch, in fp64, where the norm of x or of x + residual and that sum itself have uses."""
    x, grad, theirs = random_case(kind, 2, 6, 5, torch.float64)
    tensors = [x, x.flip(0) + 1, grad, grad.flip(1) * 2]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[: 1 + residual]]
    h = sum(leaves)
    y = theirs(h)
    torch.autograd.backward(
        *{"both": ([y, h], tensors[2:]), "norm": ([y], [grad]), "h": ([h], [tensors[3]])}[used]
    )
    expected = [y.detach(), h.detach(), *(leaf.grad for leaf in leaves)]
    parameters = [torch.zeros_like(p) if p.grad is None else p.grad for p in theirs.parameters()]
    tight = {"rtol": 1e-9, "atol": 1e-12}
    own, own_parameters = with_residual(
        None, build, kind, theirs.state_dict(), tensors, residual, used, False
    )
    torch.testing.assert_close(own, expected, **tight)
    torch.testing.assert_close(own_parameters, parameters, **tight)
    results = run_mesh(
        3, with_residual, build, kind, theirs.state_dict(), tensors, residual, used, True
    )
    for part, whole in enumerate(expected):
        torch.testing.assert_close(
            torch.cat([values[part] for values, _ in results], 1), whole, **tight
        )
    for _, sums in results:
        torch.testing.assert_close(sums, parameters, **tight)


def test_a_residual_of_another_dtype_widens_the_sum():
    """As under autocast, where a branch has 16 bits and the residual stream 32."""
    branch, residual = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 3, 8)
    y, h = LayerNorm(8)(branch, residual, return_residual=True)
    assert torch.equal(h, branch + residual)
    assert torch.equal(y, LayerNorm(8)(h))


@pytest.mark.parametrize("shapes", [[(2, 3)], [(2, 4), (2, 3)], [(2, 4), (4,)]])
def test_other_shapes_are_refused(shapes):
    with pytest.raises(ValueError, match=r"needs equal shapes \[..., 4\]; got"):
        LayerNorm(4)(*map(torch.zeros, shapes), return_residual=True)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_bf16_rounds_hardly_more_than_unsplit(tp, kind, run_mesh, helpers):
    """On a split sequence: at most 1.1 times the unsplit layer's distance to the fp64 result."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(4, 48, 96, generator=generator).bfloat16() for _ in range(2))
    state = {
        name: torch.randn(96, generator=generator).bfloat16()
        for name in ("weight", "bias")[: 1 + (kind == "layer")]
    }

    def unsplit(dtype):
        layer = build(kind, 96).to(dtype)
        layer.load_state_dict(state)
        leaf = x.clone().to(dtype).requires_grad_()
        output = layer(leaf)
        output.backward(grad.to(dtype))
        return [output.detach(), leaf.grad, *(parameter.grad for parameter in layer.parameters())]

    exact, plain = unsplit(torch.float64), unsplit(torch.bfloat16)
    results = run_mesh(tp, normalise, build, kind, state, x, grad, True, torch.bfloat16)
    merged = [torch.cat([result[which] for result in results], 1) for which in (0, 1)]
    for which, actual in enumerate([*merged, *results[-1][2].values()]):
        assert actual.dtype == torch.bfloat16
        assert helpers.distance(actual, exact[which]) <= 1.1 * helpers.distance(
            plain[which], exact[which]
        )


@pytest.mark.parametrize("family", ["t5", "gemma", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_as_transformers_does(dtype, family):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    norms = {"t5": (T5LayerNorm, None), "gemma": (GemmaRMSNorm, 1.0), "olmo2": (Olmo2RMSNorm, 0.0)}
    norm, offset = norms[family]
    generator = torch.Generator().manual_seed(0)
    theirs, ours = norm(64, 1e-6).to(dtype), RMSNorm(64, 1e-6, offset=offset).to(dtype)
    assert torch.equal(ours.weight, theirs.weight)
    weight = torch.randn(64, generator=generator).to(dtype)
    x = 300 * torch.randn(4, 7, 64, generator=generator).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        ours.weight.copy_(weight)
    with kernels("reference"):
        assert torch.equal(ours(x), theirs(x))
    # A compiled kernel sums the squares in another order.
    torch.testing.assert_close(
        ours(x), theirs(x), rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0
    )
