"""What the CUDA and Triton kernels compute, on a GPU. Collected where there is one, or SHARDZOO_TEST_DEVICE is set."""

from __future__ import annotations

import pytest
import torch

from shardzoo import ops


@pytest.mark.parametrize("sizes", [(5, 37), (40, 130), (3, 64), (64, 4096), (2, 20000)], ids=str)
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
