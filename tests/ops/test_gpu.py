"""What the CUDA and Triton kernels compute, on a GPU. Collected where there is one, or SHARDZOO_TEST_DEVICE is set."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from shardzoo import ops
from shardzoo.ops.registration import OPS

ATTENTION_RULES = ("none", "causal", "mask", "prefix", "lengths", "bias", "dropout", "grouped")
# In relation to the largest value; fp32 without TF32.
ATTENTION_BOUNDS = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}


@pytest.mark.parametrize(
    "sizes", [(5, 37), (40, 130), (3, 64), (64, 4096), (2, 20000)], ids="{0[0]}x{0[1]}".format
)
def test_gpu_matches_fp64(zoo, case_name, variant, dtype, sizes):
    """On a GPU: every case against the fp64 reference on the CPU. __expf costs a few more bits."""
    if variant == "triton" and dtype == torch.float64:
        return
    case = zoo.cases(*sizes)[case_name]
    expected = case.rounded(dtype).run("reference", torch.float64)
    moved = {
        name: t.to(zoo.device) if isinstance(t, torch.Tensor) else t
        for name, t in case.tensors.items()
    }
    results = zoo.Case(case.function, moved, case.differentiable, case.constants).run(
        variant, dtype
    )
    zoo.close({name: value.cpu() for name, value in results.items()}, expected, dtype, slack=4.0)


def test_gpu_is_reproducible(zoo, case_name, variant):
    case = zoo.cases(150, 256)[case_name]
    moved = {
        name: t.to(zoo.device) if isinstance(t, torch.Tensor) else t
        for name, t in case.tensors.items()
    }
    case = zoo.Case(case.function, moved, case.differentiable, case.constants)
    first, second = case.run(variant, torch.bfloat16), case.run(variant, torch.bfloat16)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_gpu_offsets_beyond_two_to_the_31(zoo, variant):
    x = torch.zeros((1 << 16) + 1, 1 << 15, dtype=torch.bfloat16, device=zoo.device)
    x[-1] = torch.linspace(-4, 4, 1 << 15)
    with ops.kernels(variant):
        last = ops.bias_gelu(x[-1:].clone())
        assert torch.equal(ops.bias_gelu(x)[-1:], last)


def test_tensors_on_two_devices(variant):
    with ops.kernels(variant), pytest.raises(ValueError, match="use one device"):
        ops.rms_norm(torch.ones(2, 4, device="cuda"), torch.ones(4), 1e-6)


def list_attention_cases():
    """Returns every rule at every length in each type; the widths of heads take turns."""
    widths = itertools.cycle((64, 80, 128, 256))
    shapes = itertools.product(
        ATTENTION_RULES, ((64, 64), (129, 257), (1024, 1024)), ATTENTION_BOUNDS
    )
    return [(rule, lengths, dtype, next(widths)) for rule, lengths, dtype in shapes]


@pytest.mark.parametrize(("rule", "lengths", "kind", "width"), list_attention_cases(), ids=str)
def test_gpu_attention_matches_fp64(zoo, monkeypatch, rule, lengths, kind, width):
    """The Triton kernels with their own tiles, into outputs that begin as NaN."""
    for op in (OPS["attention"], OPS["attention_backward"]):
        empty = op.allocate
        monkeypatch.setattr(
            op, "allocate", lambda *a, empty=empty: tuple(t.fill_(math.nan) for t in empty(*a))
        )
    generator = torch.Generator().manual_seed(width)
    queries, keys = lengths

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(kind)

    groups = 2 if rule == "grouped" else 4
    tensors = {
        "q": normal(2, 4, queries, width) * (8 / width) ** 0.5,
        "k": normal(2, groups, keys, width),
        "v": normal(2, groups, keys, width) / width**0.5,
    }
    if rule == "bias":
        tensors["relative_bias"] = normal(4, queries + keys - 1)
    grad = normal(2, 4, queries, width)
    rules = {"causal": rule in ("causal", "prefix"), "dropout": 0.1 if rule == "dropout" else 0.0}
    others = {}
    if rule == "mask":
        others["mask"] = torch.rand(2, 1, 1, keys, generator=generator) > 0.2
    elif rule == "prefix":
        others["prefix"] = torch.tensor([keys // 3, 0])
    elif rule == "lengths":
        others["key_lengths"] = torch.tensor([keys - 5, keys // 2])
    elif rule == "dropout":
        others["keys"] = ops.dropout_keys(3, 1, 2)

    def compute(variant, device, dtype):
        leaves = {
            name: x.to(device, dtype).detach().requires_grad_() for name, x in tensors.items()
        }
        moved = {name: x.to(device) for name, x in others.items()}
        with ops.kernels(variant):
            out = ops.attention(**leaves, scale=0.3, **moved, **rules)
            grads = torch.autograd.grad(out, list(leaves.values()), grad.to(device, dtype))
        return [x.detach().cpu().double() for x in (out, *grads)]

    expected = compute("reference", "cpu", torch.float64)
    for value, wanted in zip(compute("triton", zoo.device, kind), expected, strict=True):
        largest = max(1.0, wanted.abs().max().item())
        assert (value - wanted).abs().max().item() <= ATTENTION_BOUNDS[kind] * largest


@pytest.mark.parametrize("kind", ATTENTION_BOUNDS, ids=str)
@pytest.mark.parametrize("rule", ["none", "causal", "bias", "dropout"])
def test_gpu_varlen_attention_matches_fp64(zoo, rule, kind):
    """Samples of several lengths one after another, one of them without a row."""
    generator = torch.Generator().manual_seed(3)
    lengths = (300, 0, 64, 129)
    starts = torch.tensor([0, *itertools.accumulate(lengths)])

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(kind)

    width = 64 if kind != torch.float16 else 128
    rows = normal(sum(lengths), 12, width)
    tensors = {
        "q": rows[:, :4] * (8 / width) ** 0.5,
        "k": rows[:, 4:8],
        "v": rows[:, 8:] / width**0.5,
    }
    if rule == "bias":
        tensors["relative_bias"] = normal(4, 599)
    grad = normal(sum(lengths), 4, width)
    dropout = 0.1 if rule == "dropout" else 0.0
    sample_keys = ops.dropout_keys(3, 1, 4) if dropout else None

    def compute(variant, device, dtype):
        leaves = {
            name: x.to(device, dtype).detach().requires_grad_() for name, x in tensors.items()
        }
        own_starts = starts.to(device)
        with ops.kernels(variant):
            out = ops.varlen_attention(
                **leaves, query_starts=own_starts, key_starts=own_starts, max_queries=300, max_keys=300, scale=0.3,
                causal=rule == "causal", dropout=dropout, keys=None if sample_keys is None else sample_keys.to(device),
            )  # fmt: skip
            grads = torch.autograd.grad(out, list(leaves.values()), grad.to(device, dtype))
        return [x.detach().cpu().double() for x in (out, *grads)]

    expected = compute("reference", "cpu", torch.float64)
    for value, wanted in zip(compute("triton", zoo.device, kind), expected, strict=True):
        largest = max(1.0, wanted.abs().max().item())
        assert (value - wanted).abs().max().item() <= ATTENTION_BOUNDS[kind] * largest
