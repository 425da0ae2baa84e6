"""Products in pieces and through symmetric memory, against `F.linear` on the whole sequence and weight.

gloo ranks stand for GPUs: they are told to gather in pieces, and they run torch's own reference of the operators in
symmetric memory, which torch registers for devices without memory.
"""

from __future__ import annotations

import contextlib
import socket

import pytest
import torch
from small_transformer import build_transformer
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardzoo import mpu
from shardzoo.mpu import fused_products, shared_memory

IN, OUT = 6, 30
FUSED = ("symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter")


@contextlib.contextmanager
def in_pieces(mesh, pieces=3):
    kept, fused_products._count_pieces = (
        fused_products._count_pieces,
        lambda tensor, group: pieces,
    )
    try:
        yield
    finally:
        fused_products._count_pieces = kept


@contextlib.contextmanager
def in_symmetric_memory(mesh):
    module, library = fused_products._operators(), torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", module._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", module._fused_matmul_reduce_scatter_fallback, "CPU")
    fused_products._symmetric.add(mesh.tp_group)
    try:
        yield
    finally:
        fused_products._symmetric.discard(mesh.tp_group)
        library._destroy()


@contextlib.contextmanager
def plainly(mesh):
    yield


class Calls(TorchDispatchMode):
    """How often each operator is called."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def filled(layer, seed, dtype):
    """A layer with known whole weights, of which it holds its part; and those whole weights."""
    generator = torch.Generator().manual_seed(seed)
    whole = [
        torch.randn(layer.out_features, layer.in_features, generator=generator, dtype=torch.float64)
    ]
    if layer.bias is not None:
        whole.append(torch.randn(layer.out_features, generator=generator, dtype=torch.float64))
    whole = [tensor.to(dtype) for tensor in whole]
    layer.to(dtype)
    with torch.no_grad():
        for parameter, tensor in zip(layer.parameters(), whole, strict=True):
            shard = getattr(parameter, "shard", None)
            parameter.copy_(
                shard.slice(tensor, layer.mesh.tp_rank, layer.mesh.tp_size) if shard else tensor
            )
    return layer, whole


def both_layers(mesh, cut, way, batch, share, bias, dtype):
    """Outputs and gradients of a column- and a row-parallel layer, those of the whole layers, and the calls."""
    rank, size = mesh.tp_rank, mesh.tp_size
    results = []
    for kind in (mpu.ColumnParallelLinear, mpu.RowParallelLinear):
        column = kind is mpu.ColumnParallelLinear
        features = (IN, OUT) if column else (OUT, IN)
        layer, whole = filled(
            kind(*features, bias=bias, sequence_parallel=True, mesh=mesh), 1, dtype
        )
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(
            batch, size * share, features[0], generator=generator, dtype=torch.float64
        ).to(dtype)
        grad = torch.randn(
            batch, size * share, features[1], generator=generator, dtype=torch.float64
        ).to(dtype)
        x_dim, out_dim = (1, -1) if column else (-1, 1)
        own_x = (
            cut(x, x_dim, rank, size).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        )
        own_grad = cut(grad, out_dim, rank, size)
        with way(mesh), Calls() as calls:
            output = layer(own_x)
            output.backward(own_grad.clone())
        exact = [tensor.double().requires_grad_() for tensor in (x, *whole)]
        expected = F.linear(*exact)
        expected.backward(grad.double())
        weight_dim = 0 if column else 1
        pairs = [(output.detach(), cut(expected.detach(), out_dim, rank, size))]
        pairs += [(own_x.grad, cut(exact[0].grad, x_dim, rank, size))]
        pairs += [(layer.weight.grad, cut(exact[1].grad, weight_dim, rank, size))]
        if bias:
            pairs += [
                (layer.bias.grad, cut(exact[2].grad, 0, rank, size) if column else exact[2].grad)
            ]
        results.append((pairs, calls.counts, output.is_contiguous()))
    return results


SHAPES = [(1, 1), (1, 5), (2, 3), (5, 2)]  # samples, positions of a rank


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("way", [in_pieces, in_symmetric_memory])
def test_outputs_and_gradients_are_those_of_the_whole_layer(way, tp, bias, run_mesh, helpers):
    for batch, share in SHAPES:
        for layers in run_mesh(
            tp, both_layers, helpers.cut, way, batch, share, bias, torch.float32
        ):
            for pairs, _, contiguous in layers:
                assert contiguous
                for actual, expected in pairs:
                    assert actual.shape == expected.shape
                    helpers.close(actual, expected.float())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", [in_pieces, in_symmetric_memory])
def test_sixteen_bit_products_are_as_exact(way, bias, run_mesh, helpers):
    """Symmetric memory rounds a product before it adds the bias: two roundings of about the same size instead of one.

    Otherwise 1.5 times, the factor that docs/mpu.md gives for splitting a layer.
    """
    most = 2 if bias and way is in_symmetric_memory else 1.5
    plain, fused = (
        run_mesh(3, both_layers, helpers.cut, w, 2, 4, bias, torch.bfloat16)[0]
        for w in (plainly, way)
    )
    for (pairs, _, _), (others, _, _) in zip(plain, fused, strict=True):
        for (reference, exact), (actual, _) in zip(pairs, others, strict=True):
            assert actual.dtype == torch.bfloat16
            assert helpers.distance(actual, exact) <= most * helpers.distance(reference, exact)


def test_symmetric_memory_has_each_exposed_collective(run_mesh, helpers):
    """The column-parallel layer's gather, and the row-parallel layer's sum and its backward gather."""
    column, row = (calls for _, calls, _ in run_mesh(2, both_layers, helpers.cut, in_symmetric_memory, 2, 2, True,
                                                     torch.float32)[0])  # fmt: skip
    assert [column.get(name, 0) for name in FUSED] == [1, 0]
    assert [row.get(name, 0) for name in FUSED] == [1, 1]


def losses(mesh, way, recompute):
    model = build_transformer(
        mesh,
        layers=2,
        hidden=24,
        vocabulary=37,
        dropout=0.1,
        sequence_parallel=True,
        recompute=recompute,
    )
    ids = torch.arange(36).view(2, 18) % 37
    mpu.dropout_state.set(0, 0)
    with way(mesh):
        loss = model(ids, ids)
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("way", [in_pieces, in_symmetric_memory])
def test_a_model_has_the_same_loss_and_gradients(way, recompute, run_mesh, helpers):
    plain, fused = (run_mesh(3, losses, w, recompute)[1] for w in (plainly, way))
    for expected, actual in zip(plain, fused, strict=True):
        helpers.close(actual, expected)


def pieces_of(mesh, samples, share, hidden, device):
    tensor = torch.empty(samples, share, hidden, dtype=torch.bfloat16, device=device)
    return fused_products._count_pieces(tensor, mesh.tp_group)


def test_only_large_gathers_of_an_accelerator_are_cut(run_mesh):
    """The meta device stands for an accelerator. 1,024 positions of 4,096 elements over two ranks are 16 MiB."""
    for shape, pieces in [
        ((1, 64, 512), 0),
        ((1, 384, 4096), 1),
        ((1, 512, 4096), 2),
        ((4, 4096, 4096), 4),
    ]:
        assert run_mesh(2, pieces_of, *shape, "meta") == [pieces] * 2
    assert run_mesh(2, pieces_of, 4, 4096, 4096, "cpu") == [1, 1]


def uneven(mesh):
    layer = mpu.RowParallelLinear(4, 4, sequence_parallel=True, mesh=mesh)
    with in_symmetric_memory(mesh):
        layer(torch.ones(1, 5, layer.weight.shape[1]))


def test_a_sequence_that_the_ranks_do_not_divide_is_refused(run_mesh):
    with pytest.raises(
        Exception, match="cannot split sequences of 5 positions over 2 tensor-parallel ranks"
    ):
        run_mesh(2, uneven)


class Refuses:
    """Stands for torch's module where the driver refuses."""

    @staticmethod
    def empty(*_, **__):
        return None

    @staticmethod
    def rendezvous(*_):
        raise RuntimeError("CUDA driver error: peer access is not supported\nwith a second line")


def refusals(mesh):
    """What a rank says without a GPU, on two hosts, and where one rank's driver refuses."""
    kept = fused_products._find_missing_gpu, socket.gethostname, fused_products._operators
    found = []

    def attempt():
        with pytest.raises(ValueError, match="symmetric memory needs") as error:
            mpu.use_symmetric_memory(mesh.tp_group)
        found.append(str(error.value))

    try:
        attempt()
        fused_products._find_missing_gpu = lambda group: ""
        socket.gethostname = lambda: f"node{mesh.tp_rank}"
        attempt()
        socket.gethostname = lambda: "node0"
        fused_products._operators = lambda: Refuses
        attempt()
    finally:
        fused_products._find_missing_gpu, socket.gethostname, fused_products._operators = kept
    return found, mesh.tp_group in fused_products._symmetric


def test_symmetric_memory_is_refused_where_it_does_not_exist(run_mesh):
    for (no_gpu, hosts, driver), is_on in run_mesh(2, refusals):
        assert "but the ranks compute on CPUs; use symmetric_memory=False" in no_gpu
        assert "but the tensor-parallel ranks are on 2 hosts: node0, node1; use" in hosts
        assert "but CUDA driver error: peer access is not supported; use" in driver
        assert not is_on


class Order(TorchDispatchMode):
    """Products, and gathers started and waited for, in their order."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"):
            self.events.append("product")
        return func(*args, **(kwargs or {}))

    def watch(self, start):
        def started(channel, kind, *tensors):
            self.events.append("start")
            finish = start(channel, kind, *tensors)

            def finished():
                self.events.append("wait")
                return finish()

            return finished

        return started


def order_of(mesh, kind, batch):
    """The events of the forward pass of a column-parallel, or the backward pass of a row-parallel layer."""
    column = kind == "column"
    layer = (mpu.ColumnParallelLinear if column else mpu.RowParallelLinear)(
        6, 6, sequence_parallel=True, mesh=mesh
    )
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    x = torch.ones(batch, 6 // (2 if column else 1), 6 if column else 3, requires_grad=True)
    shared_memory.find(x, mesh.tp_group)  # opening the memory sends a few numbers
    output = None if column else layer(x)
    start = shared_memory.start
    with in_pieces(mesh, 3), Order() as mode:
        shared_memory.start = mode.watch(start)
        try:
            layer(x) if output is None else output.sum().backward()
        finally:
            shared_memory.start = start
    return mode.events


@pytest.mark.parametrize("batch", [1, 3])
def test_the_next_pieces_travel_while_a_piece_is_multiplied(batch, run_mesh):
    pieces = ["start", "start", "start", *["wait", "product"] * 3]
    for events in run_mesh(2, order_of, "column", batch):
        assert events == pieces
    for events in run_mesh(2, order_of, "row", batch):
        assert events == [*pieces, "product"]  # the weight gradient, of the whole
