"""Column- and row-parallel layers against `F.linear` on the whole weight."""

from __future__ import annotations

import pytest
import torch
from every_case import every_day
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F

from shardzoo.mpu import ColumnParallelLinear, RowParallelLinear, Shard, cache_shared_heads

TP = every_day([2, 3], more=[1, 4])


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def unsplit(x, weight, bias, grad):
    """Output, input gradient, weight gradient, bias gradient of the whole layer."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    bias = bias.clone().requires_grad_() if bias is not None else None
    output = F.linear(x, weight, bias)
    output.backward(grad)
    return output.detach(), x.grad, weight.grad, None if bias is None else bias.grad


def run_layer(layer, x, weight, bias, grad):
    """The same four of a layer that holds this rank's part of everything."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    layer.to(weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    output = layer(x)
    kept_grad, kept_x = grad.clone(), x.detach().clone()
    output.backward(grad)
    assert torch.equal(grad, kept_grad)  # a gradient that others may hold is left alone
    assert torch.equal(x.detach(), kept_x)
    return output.detach(), x.grad, layer.weight.grad, None if bias is None else layer.bias.grad


def column(mesh, cut, x, weight, bias, grad, groups, options):
    rank, size = mesh.tp_rank, mesh.tp_size
    layer = ColumnParallelLinear(
        weight.shape[1], weight.shape[0], bias=bias is not None, groups=groups, mesh=mesh, **options
    )
    if options["sequence_parallel"]:
        x = x.chunk(size, 1)[rank]
    if not options["gather_output"]:
        grad = cut(grad, -1, rank, size, groups)
    bias = None if bias is None else cut(bias, 0, rank, size, groups)
    return run_layer(layer, x, cut(weight, 0, rank, size, groups), bias, grad)


def row(mesh, cut, x, weight, bias, grad, options):
    rank, size = mesh.tp_rank, mesh.tp_size
    layer = RowParallelLinear(
        weight.shape[1], weight.shape[0], bias=bias is not None, mesh=mesh, **options
    )
    if options["input_is_parallel"]:
        x = cut(x, -1, rank, size)
    if options["sequence_parallel"]:
        grad = cut(grad, 1, rank, size)
    return run_layer(layer, x, cut(weight, 1, rank, size), bias, grad)


def each_mode(mesh, run, modes, *args):
    """All modes of one layer in one round trip."""
    return [run(mesh, *args, mode) for mode in modes]


def noncontiguous(tensor, wanted):
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if wanted else tensor


@pytest.mark.parametrize("tp", TP)
def test_column_parallel_equals_unsplit(tp, run_mesh, helpers):
    @given(
        batch=st.integers(0, 3),
        positions=st.integers(1, 3),
        in_features=st.integers(1, 9),
        widths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        more=st.integers(0, 2),
        bias=st.booleans(),
        strided=st.booleans(),
    )
    @example(batch=2, positions=2, in_features=5, widths=[2, 1, 3], more=0, bias=True, strided=True)
    @example(batch=2, positions=2, in_features=5, widths=[2, 1, 3], more=1, bias=True, strided=True)
    def check(batch, positions, in_features, widths, more, bias, strided):
        groups = tuple((widths[0] if more else width) * tp + more for width in widths)
        x = noncontiguous(random(batch, positions * tp, in_features), strided)
        weight, b = (
            random(sum(groups), in_features, seed=1),
            random(sum(groups), seed=2) if bias else None,
        )
        grad = noncontiguous(random(batch, positions * tp, sum(groups), seed=3), strided)
        expected = unsplit(x, weight, b, grad)
        modes = [
            {"gather_output": g, "sequence_parallel": s}
            for g in (False, True)
            for s in (False, True)
        ]
        results = run_mesh(tp, each_mode, column, modes, helpers.cut, x, weight, b, grad, groups)
        for rank, by_mode in enumerate(results):
            parts = [
                helpers.cut(expected[which], dim, rank, tp, groups)
                for which, dim in ((0, -1), (2, 0))
            ]
            for mode, actual in zip(modes, by_mode, strict=True):
                helpers.close(actual[0], expected[0] if mode["gather_output"] else parts[0])
                x_grad = (
                    helpers.cut(expected[1], 1, rank, tp)
                    if mode["sequence_parallel"]
                    else expected[1]
                )
                helpers.close(actual[1], x_grad)
                helpers.close(actual[2], parts[1])
                if bias:
                    helpers.close(actual[3], helpers.cut(expected[3], 0, rank, tp, groups))

    check()


@pytest.mark.parametrize("tp", TP)
def test_row_parallel_equals_unsplit(tp, run_mesh, helpers):
    @given(
        batch=st.integers(0, 3),
        positions=st.integers(1, 3),
        width=st.integers(1, 5),
        more=st.integers(0, 2),
        out_features=st.integers(1, 9),
        bias=st.booleans(),
        strided=st.booleans(),
    )
    @example(batch=2, positions=2, width=3, more=1, out_features=5, bias=True, strided=True)
    def check(batch, positions, width, more, out_features, bias, strided):
        in_features = width * tp + more
        x = noncontiguous(random(batch, positions * tp, in_features), strided)
        weight, b = (
            random(out_features, in_features, seed=1),
            random(out_features, seed=2) if bias else None,
        )
        grad = noncontiguous(random(batch, positions * tp, out_features, seed=3), strided)
        expected = unsplit(x, weight, b, grad)
        modes = [
            {"input_is_parallel": i, "sequence_parallel": s}
            for i in (False, True)
            for s in (False, True)
        ]
        results = run_mesh(tp, each_mode, row, modes, helpers.cut, x, weight, b, grad)
        for rank, by_mode in enumerate(results):
            for mode, actual in zip(modes, by_mode, strict=True):
                output = (
                    helpers.cut(expected[0], 1, rank, tp)
                    if mode["sequence_parallel"]
                    else expected[0]
                )
                x_grad = (
                    helpers.cut(expected[1], -1, rank, tp)
                    if mode["input_is_parallel"]
                    else expected[1]
                )
                helpers.close(actual[0], output)
                helpers.close(actual[1], x_grad)
                helpers.close(actual[2], helpers.cut(expected[2], 1, rank, tp))
                if bias:
                    helpers.close(actual[3], expected[3])

    check()


def lent(mesh, x, weight, bias, grads, groups, unit):
    """Output and gradients of a layer with shared blocks, in both modes, and the output without gradients."""
    results = []
    for sequence_parallel in (False, True):
        options = {
            "groups": groups,
            "unit": unit,
            "shared_kv_groups": (1, 2),
            "sequence_parallel": sequence_parallel,
            "mesh": mesh,
        }
        layer = ColumnParallelLinear(
            weight.shape[1], weight.shape[0], bias=bias is not None, **options
        )
        parts = [
            None if t is None else layer.shard.slice(t, mesh.tp_rank, mesh.tp_size)
            for t in (weight,)
        ]
        if bias is not None:
            parts.append(layer.bias.shard.slice(bias, mesh.tp_rank, mesh.tp_size))
        own = x.chunk(mesh.tp_size, 1)[mesh.tp_rank] if sequence_parallel else x
        results.append(
            run_layer(layer, own, *parts, *[None] * (2 - len(parts)), grads[mesh.tp_rank])
        )
        with torch.inference_mode(), cache_shared_heads(layer):
            first = layer(own)
            torch.testing.assert_close(first, results[-1][0], rtol=1e-5, atol=1e-6)
            layer.weight.zero_()
            assert torch.equal(layer(own), first)  # with the rows that it has borrowed
        for inference in (False, True):
            with torch.inference_mode(inference):
                assert not torch.equal(layer(own), first)
    return results


@pytest.mark.parametrize(
    ("tp", "heads", "key_values"), [(4, 8, 2), (3, 8, 2), (2, 9, 3), (3, 10, 5), (4, 4, 1)]
)
def test_rows_that_several_ranks_need_are_lent(tp, heads, key_values, run_mesh, helpers):
    """Each rank computes the key-value heads of its query heads; gradients come home to the rank that holds a row."""
    unit, served = 3, heads // key_values
    groups = tuple(unit * count for count in (heads, key_values, key_values))
    x, weight, bias = random(2, 12, 5), random(sum(groups), 5, seed=1), random(sum(groups), seed=2)
    shared = {"shared_kv_groups": (1, 2)}
    shard, features = Shard(tuple(weight.shape), 0, groups, unit, **shared), []
    for rank in range(tp):
        own = [head for head in range(heads) if head * tp // heads == rank]
        kept = sorted({head // served for head in own})
        blocks = ((own, 0), (kept, heads), (kept, heads + key_values))
        features.append(
            [
                (first + head) * unit + i
                for block, first in blocks
                for head in block
                for i in range(unit)
            ]
        )
    grads = [random(2, 12, len(rows), seed=3 + rank) for rank, rows in enumerate(features)]
    for b in (bias, None):
        total = torch.zeros(2, 12, sum(groups))
        for rows, grad in zip(features, grads, strict=True):
            total[..., rows] += grad
        expected = unsplit(x, weight, b, total)
        results = run_mesh(tp, lent, x, weight, b, grads, groups, unit)
        for mode in (0, 1):
            for rank, result in enumerate(results):
                helpers.close(result[mode][0], expected[0][..., features[rank]])
                helpers.close(
                    result[mode][1], helpers.cut(expected[1], 1, rank, tp) if mode else expected[1]
                )
            helpers.close(shard.merge([result[mode][2] for result in results]), expected[2])
            if b is not None:
                bias_shard = Shard((sum(groups),), 0, groups, unit, **shared)
                helpers.close(
                    bias_shard.merge([result[mode][3] for result in results]), expected[3]
                )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", TP)
def test_bf16_rounds_hardly_more_than_unsplit(tp, sequence_parallel, run_mesh, helpers):
    """Distance to the fp64 result of the same bf16 numbers, at most 1.5 times that of the unsplit layer."""
    kinds = {"x": (2, 48, 96), "weight": (72, 96), "bias": (72,), "grad": (2, 48, 72)}
    tensors = [
        random(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate(kinds.values())
    ]
    exact = unsplit(*(t.double() for t in tensors))
    plain = [
        helpers.distance(actual, true)
        for actual, true in zip(unsplit(*tensors), exact, strict=True)
    ]
    x, weight, bias, grad = tensors
    options = {"sequence_parallel": sequence_parallel}
    by_column = run_mesh(
        tp, column, helpers.cut, x, weight, bias, grad, None, {**options, "gather_output": True}
    )
    by_row = run_mesh(
        tp, row, helpers.cut, x, weight, bias, grad, {**options, "input_is_parallel": True}
    )
    merged_dims = [
        (by_column, [None, 1 if sequence_parallel else None, 0, 0]),
        (by_row, [1 if sequence_parallel else None, -1, 1, None]),
    ]
    for results, dims in merged_dims:
        for which, dim in enumerate(dims):
            parts = [result[which] for result in results]
            whole = parts[0] if dim is None else torch.cat(parts, dim)
            assert whole.dtype == torch.bfloat16
            assert helpers.distance(whole, exact[which]) <= 1.5 * plain[which]


def test_autocast_is_that_of_an_unsplit_layer(run_mesh):
    """Under torch.autocast the layers compute in bf16 and leave fp32 gradients, as nn.Linear does."""
    x, weight, bias = random(2, 4, 8), random(6, 8, seed=1), random(6, seed=2)

    def both(mesh):
        results = []
        for layer in (ColumnParallelLinear(8, 6, mesh=mesh), RowParallelLinear(8, 6, mesh=mesh)):
            with torch.no_grad():
                layer.weight.copy_(layer.weight.shard.slice(weight, mesh.tp_rank, mesh.tp_size))
                layer.bias.copy_(
                    bias.chunk(mesh.tp_size)[mesh.tp_rank] if len(layer.bias) < 6 else bias
                )
            part = (
                x.chunk(mesh.tp_size, -1)[mesh.tp_rank]
                if isinstance(layer, RowParallelLinear)
                else x
            )
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = layer(part)
            output.sum().backward()
            results.append(
                (output.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype, output.detach())
            )
        return results

    (column_0, row_0), (column_1, _) = run_mesh(2, both)
    assert column_0[:3] == row_0[:3] == (torch.bfloat16, torch.float32, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.linear(x, weight, bias)
    torch.testing.assert_close(torch.cat([column_0[3], column_1[3]], -1), expected)
    torch.testing.assert_close(row_0[3], expected, rtol=2e-2, atol=4e-2)  # one more bf16 rounding


def test_frozen_weights_and_inputs_cost_no_gradient(run_mesh):
    def frozen(mesh):
        layer = ColumnParallelLinear(4, 6, mesh=mesh)
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        layer.weight.requires_grad_(False)
        x = torch.ones(2, 4, requires_grad=True)
        layer(x).sum().backward()
        layer(torch.ones(2, 4)).sum().backward()
        return x.grad, layer.weight.grad, layer.bias.grad

    for x_grad, weight_grad, bias_grad in run_mesh(2, frozen):
        assert torch.equal(x_grad, torch.full((2, 4), 6.0))
        assert weight_grad is None
        assert torch.equal(bias_grad, torch.full((3,), 4.0))


def test_layers_print_their_shard():
    layer = ColumnParallelLinear(8, 24, groups=(8, 8, 8), unit=4)
    assert "24x8 split along 0 in blocks 8+8+8 in units of 4" in repr(layer)
    assert "8x24 split along 1" in repr(RowParallelLinear(24, 8, sequence_parallel=True))


def test_errors_name_the_sizes_that_work(run_mesh):
    def refused(mesh):
        messages = []
        for build in (
            lambda: ColumnParallelLinear(8, 6, unit=2, mesh=mesh),
            lambda: RowParallelLinear(3, 8, mesh=mesh),
            lambda: RowParallelLinear(8, 8, sequence_parallel=True, mesh=mesh)(
                torch.zeros(1, 10, 2)
            ),
        ):
            with pytest.raises(
                ValueError, match=r"cannot (be split 4 ways; use 1 to 3 ranks|split .* over 4)"
            ) as error:
                build()
            messages.append(str(error.value))
        return messages

    assert "pad them to a multiple of 4, such as 12" in run_mesh(4, refused)[0][2]
