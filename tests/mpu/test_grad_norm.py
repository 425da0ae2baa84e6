"""The gradient's norm and clipping, against torch on the whole model."""

from __future__ import annotations

import pytest
import torch
from small_transformer import build_transformer

from shardzoo import mpu, ops


def norms(mesh, build, sequence_parallel, max_norm, dtype):
    model = build(mesh, layers=1, vocabulary=37, hidden=16, sequence_parallel=sequence_parallel).to(
        dtype
    )
    ids = torch.arange(24).view(2, 12) % 37
    mpu.dropout_state.set(1, 0)
    model(ids, ids).backward()
    norm = mpu.clip_grad_norm_(model.parameters(), max_norm, mesh)
    clipped = {name: (p.grad, getattr(p, "shard", None)) for name, p in model.named_parameters()}
    return norm, clipped, mpu.grad_norm(model.parameters(), mesh)


def unsplit(build, max_norm):
    model = build(None, layers=1, vocabulary=37, hidden=16)
    ids = torch.arange(24).view(2, 12) % 37
    mpu.dropout_state.set(1, 0)
    model(ids, ids).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "data"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_norm_and_clipped_gradients_are_those_of_the_unsplit_model(
    tp, data, sequence_parallel, max_norm, run_mesh
):
    build = build_transformer
    expected_norm, expected = unsplit(build, max_norm)
    results = run_mesh(tp, norms, build, sequence_parallel, max_norm, torch.float32, data=data)
    for norm, _, norm_after in results:
        torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(
            norm_after, expected_norm.clamp(max=max_norm), rtol=1e-5, atol=0.0
        )
        assert torch.equal(norm, results[0][0])  # every rank scales by the same factor
    for name, grad in expected.items():
        parts = [clipped[name][0] for _, clipped, _ in results[:tp]]
        shard = results[0][1][name][1]
        merged = shard.merge(parts) if shard else parts[-1]
        torch.testing.assert_close(merged, grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))


def test_padding_rows_of_the_vocabulary_have_no_gradient(run_mesh):
    def padding_grads(mesh, build):
        model = build(mesh, layers=1, vocabulary=37, hidden=16)
        mpu.dropout_state.set(1, 0)
        ids = torch.arange(24).view(2, 12)
        model(ids, ids).backward()
        grad = model.embedding.weight.grad
        [(start, stop)] = model.embedding.shard.ranges(mesh.tp_rank, mesh.tp_size)
        return len(grad) - (stop - start), float(grad[stop - start :].abs().sum())

    assert run_mesh(4, padding_grads, build_transformer) == [(0, 0.0)] * 3 + [(3, 0.0)]


def test_pipeline_stages_add_up(run_mesh):
    def norm(mesh):
        split, replicated, shared = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
        for parameter in (split, replicated, shared):
            parameter.grad = torch.full((2,), float(mesh.pp_rank + 1))
        split.tensor_model_parallel = True
        split.grad += mesh.tp_rank
        shared.ds_pipe_replicated = mesh.pp_rank == 1  # the second holder of a tied embedding
        return float(mpu.grad_norm([split, replicated, shared], mesh))

    #          stage 0: split 1, 2; replicated 1; shared 1     stage 1: split 2, 3; replicated 2
    expected = (2 * (1 + 4 + 1 + 1) + 2 * (4 + 9 + 4)) ** 0.5
    assert run_mesh(2, norm, pipeline=2) == pytest.approx([expected] * 4)


def test_no_gradient_at_all():
    assert mpu.grad_norm([torch.nn.Parameter(torch.zeros(2))]) == 0
    assert mpu.clip_grad_norm_([], 1.0) == 0


def test_bf16_gradients_are_summed_in_fp32():
    parameter = torch.nn.Parameter(torch.zeros(1 << 14, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    assert mpu.grad_norm([parameter]) == 128  # a bf16 sum would stop at 256 of the 16384 ones


def test_16_bit_gradients_are_scaled_by_an_unrounded_factor():
    gradient = torch.linspace(1, 2, 1000).bfloat16()
    parameters = [torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = gradient.clone()
    mpu.clip_grad_norm_(parameters[:1], 0.3)
    torch.nn.utils.clip_grad_norm_(parameters[1:], 0.3)
    exact = gradient.double() * 0.3 / gradient.double().norm()
    torch.testing.assert_close(parameters[0].grad.double(), exact, rtol=2**-8, atol=0.0)
    assert torch.equal(
        parameters[0].grad, (gradient.float() * (0.3 / (gradient.float().norm() + 1e-6))).bfloat16()
    )


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_gradients_of_several_dtypes_and_layouts(kernels):
    parameters = [
        torch.nn.Parameter(torch.zeros(4, dtype=d))
        for d in (torch.float64, torch.bfloat16, torch.float32)
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    parameters.append(torch.nn.Parameter(torch.zeros(15)))
    parameters[-1].grad = torch.arange(30.0)[::2]  # the sum of its squares is 4060
    with ops.kernels(kernels):
        norm = mpu.clip_grad_norm_(parameters, 1.0)
    torch.testing.assert_close(norm, torch.tensor(4108.0).sqrt())
    assert [parameter.grad.dtype for parameter in parameters] == [
        torch.float64,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    assert float(parameters[0].grad[0]) == pytest.approx(2 / 4108**0.5, rel=1e-6)
