"""Gradients of weights that products add to fp32 sums, against those of autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from every_case import by_turns
from torch import nn

from shardzoo import mpu
from shardzoo.mpu.main_gradients import adding_to_main_gradients


def build(mesh, dtype, sequence_parallel=False):
    """Returns a column-parallel layer and a row-parallel one behind it, with the same weights in every layout."""
    shared = {"sequence_parallel": sequence_parallel, "mesh": mesh}
    layers = nn.ModuleList(
        [mpu.ColumnParallelLinear(6, 8, **shared), mpu.RowParallelLinear(8, 6, **shared)]
    )
    for number, layer in enumerate(layers):
        generator = torch.Generator().manual_seed(number)
        for parameter in (layer.weight, layer.bias):
            shard = getattr(parameter, "shard", None)
            shape = parameter.shape if shard is None else shard.shape
            whole = torch.randn(shape, generator=generator, dtype=torch.float64)
            own = (
                whole
                if shard is None or mesh is None
                else shard.slice(whole, mesh.tp_rank, mesh.tp_size)
            )
            parameter.data = own.to(dtype)
    return layers


def compute(mesh, dtype, fuses, sequence_parallel=False, times=3):
    """Returns the gradients of the weights, of the biases, and of the inputs of several micro-batches."""
    layers = build(mesh, dtype, sequence_parallel)
    targets = [
        nn.Parameter(layer.weight.detach().to(torch.promote_types(dtype, torch.float32)))
        for layer in layers
    ]
    pairs = [(layer.weight, target) for layer, target in zip(layers, targets, strict=True)]
    inputs = []
    for k in range(times):
        x = torch.randn(
            2, 4, 6, generator=torch.Generator().manual_seed(10 + k), dtype=torch.float64
        ).to(dtype)
        if sequence_parallel and mesh is not None:
            x = x.chunk(mesh.tp_size, 1)[mesh.tp_rank].contiguous()
        inputs.append(x.requires_grad_())
        with adding_to_main_gradients(pairs if fuses else []):
            layers[1](layers[0](inputs[-1])).square().sum().backward()
    weights = [
        target.grad if fuses else layer.weight.grad
        for layer, target in zip(layers, targets, strict=True)
    ]
    assert all((layer.weight.grad is None) == fuses for layer in layers)
    assert not any("main_gradient" in vars(layer.weight) for layer in layers)
    return weights, [layer.bias.grad for layer in layers], [x.grad for x in inputs]


def assert_sums_are_those_of_autograd(mesh, sequence_parallel):
    found = compute(mesh, torch.float64, True, sequence_parallel)
    expected = compute(mesh, torch.float64, False, sequence_parallel)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_sums_are_those_of_autograd():
    assert_sums_are_those_of_autograd(None, sequence_parallel=False)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_sums_are_those_of_autograd(sequence_parallel, run_mesh):
    run_mesh(2, assert_sums_are_those_of_autograd, sequence_parallel)


@pytest.mark.parametrize("dtype", by_turns([torch.bfloat16, torch.float16], 2), ids=str)
def test_16_bit_products_are_added_in_fp32(dtype):
    """Nearer to fp64 than rounded products that are added afterwards."""
    layer = mpu.ColumnParallelLinear(6, 8, bias=False)
    layer.weight.data = torch.zeros(8, 6).to(dtype)
    target = nn.Parameter(torch.zeros(8, 6))
    expected = torch.zeros(8, 6, dtype=torch.float64)
    for k in range(4):
        generator = torch.Generator().manual_seed(k)
        x, grad = (torch.randn(5, size, generator=generator).to(dtype) for size in (6, 8))
        with adding_to_main_gradients([(layer.weight, target)]):
            layer(x).backward(grad)
        expected += grad.double().t() @ x.double()
    assert target.grad.dtype == torch.float32
    torch.testing.assert_close(target.grad.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_weight_that_is_used_elsewhere_gets_both():
    layer = mpu.ColumnParallelLinear(3, 3, bias=False)
    layer.weight.data = torch.ones(3, 3)
    x = torch.randn(2, 3)
    for _ in range(2):
        with adding_to_main_gradients([(layer.weight, layer.weight)]):
            (layer(x).sum() + (layer.weight * 5.0).sum()).backward()
    torch.testing.assert_close(layer.weight.grad, 2 * (x.sum(0).expand(3, 3) + 5.0))


def test_a_weight_without_a_use_gets_no_gradient():
    layer = mpu.ColumnParallelLinear(3, 3, bias=False)
    with adding_to_main_gradients([(layer.weight, layer.weight)]):
        pass
    assert layer.weight.grad is None
