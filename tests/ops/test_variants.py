"""Every variant of every op against the fp64 reference, forward and backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from every_case import every_day
from torch.autograd import gradcheck

from shardzoo import ops

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "sizes", every_day([(5, 37)], more=[(40, 136), (40, 130), (3, 64), (1, 1)]), ids=str
)
def test_matches_fp64(zoo, case_name, variant, dtype, sizes):
    if variant == "triton" and sizes[0] > 5:
        sizes = (2, 136)  # the interpreter takes milliseconds per row
    case = zoo.cases(*sizes)[case_name]
    expected = case.rounded(dtype).run("reference", torch.float64)
    cancels = sizes[1] == 1  # normalizing one number leaves gradients of nothing but rounding
    # Triton's interpreter truncates to bf16 where a GPU rounds
    slack = 4.0 if variant == "triton" and dtype == torch.bfloat16 else 1.0
    zoo.close(case.run(variant, dtype), expected, dtype, slack=slack, floor=1.0 if cancels else 0.0)


@pytest.mark.parametrize(
    "long",
    [(torch.float16, 3, 520), (torch.float32, 2, 2057), (torch.bfloat16, 1, 16400)],
    ids=lambda long: f"{long[2]}",
)
def test_long_rows_match_fp64(zoo, case_name, variant, long):
    """On a GPU, vectors over several warps; rows too long for registers, element by element and in vectors."""
    if variant not in ("cpp", "cuda"):
        return
    dtype, rows, columns = long
    case = zoo.cases(rows, columns)[case_name]
    zoo.close(case.run(variant, dtype), case.rounded(dtype).run("reference", torch.float64), dtype)


ACTIVATIONS = {
    "gelu": (lambda x: ops.bias_gelu(x, None), F.gelu),
    "gelu_tanh": (
        lambda x: ops.bias_gelu(x, None, approximate="tanh"),
        partial(F.gelu, approximate="tanh"),
    ),
    "silu": (lambda x: ops.swiglu(x, torch.ones_like(x)), F.silu),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_all_bf16_numbers_are_rounded_once(name):
    """Also where they are near 0, though the kernels use short reciprocals; an error of 1 is half of the last place.

    Below 1e-4 the error of the distribution function, 1e-7, takes more than that.
    """
    function, plain = ACTIVATIONS[name]
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.abs() <= 8][None]

    def results(compute, x):
        x = x.detach().clone().requires_grad_()
        y = compute(x)
        y.backward(torch.ones_like(y))
        return y.detach().double(), x.grad.double()

    for found, wanted in zip(
        results(function, numbers), results(plain, numbers.double()), strict=True
    ):
        half = wanted.abs().clamp(min=1e-4) * 2**-8
        assert ((found - wanted).abs() / half).max() < 1.4


def test_statistics_without_the_sum_match(zoo, variant):
    """What cross-entropy computes without label smoothing, also for a width that vectors do not divide."""
    for columns in (136, 131):
        logits = torch.randn(3, 136, generator=torch.Generator().manual_seed(2))
        target = torch.tensor([0, columns - 1, 200])
        with ops.kernels(variant):
            *found, total = ops.cross_entropy_stats(logits, target, 0, columns, with_sum=False)
        with ops.kernels("reference"):
            expected = ops.cross_entropy_stats(logits.double(), target, 0, columns)[:3]
        assert total.numel() == 0
        zoo.close(dict(enumerate(found)), dict(enumerate(expected)), torch.float32)


@pytest.mark.parametrize(
    "steps",
    [
        (0, 30, 60),
        (0, 100, 50),
        (100, 0, -100),
        (-INF, 0, 5),
        (-INF, -INF, -INF),
        (0, 0, INF),
        (0, NAN, 200),
    ],
    ids=str,
)
def test_statistics_of_rows_that_change_from_block_to_block(steps, dtype):
    """The C++ kernel sums 2,048 logits at a time, relative to a logit that later blocks may exceed by far."""
    generator = torch.Generator().manual_seed(4)
    logits = (
        torch.randn(2, 5000, generator=generator)
        + torch.tensor(steps).repeat_interleave(2048)[:5000]
    )
    logits, target = logits.to(dtype), torch.tensor([7, 4999])
    with ops.kernels("reference"):
        maximum, *expected = ops.cross_entropy_stats(logits.double(), target, 0, 5000)
    found, *others = ops.cross_entropy_stats(logits, target, 0, 5000)
    if not logits.isnan().any():
        assert torch.equal(found.double(), maximum)
    for value, wanted in zip(others, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-4, equal_nan=True)


def test_gradcheck(zoo, case_name, variant):
    """The gradient formulas against finite differences, in fp64; Triton's kernels have no fp64."""
    if variant == "triton":
        return
    case = zoo.cases(3, 9)[case_name]
    leaves = [case.tensors[name].detach().clone().requires_grad_() for name in case.differentiable]

    def function(*values):
        named = dict(zip(case.differentiable, values, strict=True))
        return case.function(**{**case.tensors, **named}, **case.constants)

    with ops.kernels(variant):
        assert gradcheck(function, leaves, nondet_tol=0.0)
