"""What a layer sends, counted below `torch.distributed`, against the formulas of docs/mpu.md; and when it sends it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from every_case import by_turns
from small_transformer import build_transformer
from torch.utils._python_dispatch import TorchDispatchMode

from shardzoo import mpu
from shardzoo.mpu import collectives, shared_memory

BATCH, POSITIONS, HIDDEN = 2, 8, 16


class Traffic(TorchDispatchMode):
    """Bytes of the whole tensor per kind of c10d operation: what is summed, gathered or scattered."""

    WHOLE = {  # noqa: RUF012 - operation -> (name, which argument is the whole tensor)
        "allreduce_": ("all-reduce", 0),
        "_allgather_base_": ("all-gather", 0),
        "alltoall_base_": ("reduce-scatter", 1),  # with a local sum
        "_reduce_scatter_base_": ("reduce-scatter", 1),
    }

    def __init__(self):
        super().__init__()
        self.bytes, self.operations = {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            operation = func._schema.name.removeprefix("c10d::")
            self.operations.add(operation)
            name, which = self.WHOLE[operation]  # anything else is a KeyError
            tensors = args[which] if isinstance(args[which], (list, tuple)) else [args[which]]
            total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.bytes[name] = self.bytes.get(name, 0) + total
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def between_hosts(small=0):
    """Ranks exchange tensors as if they were on different hosts; those of more than `small` bytes as large ones."""
    kept, collectives._SMALL = collectives._SMALL, small
    find, shared_memory.find = shared_memory.find, lambda tensor, group: None
    try:
        yield
    finally:
        collectives._SMALL, shared_memory.find = kept, find


class SharedTraffic:
    """The same as `Traffic`, for what goes through shared memory."""

    def __init__(self):
        self.bytes = {}

    def __enter__(self):
        self._start, shared_memory.start = shared_memory.start, self._count
        return self

    def __exit__(self, *_):
        shared_memory.start = self._start

    def _count(self, channel, kind, tensor, out, count):
        name, whole = [("all-reduce", tensor), ("all-gather", out), ("reduce-scatter", tensor)][
            kind
        ]
        self.bytes[name] = self.bytes.get(name, 0) + whole.numel() * whole.element_size()
        return self._start(channel, kind, tensor, out, count)


def traffic(mesh, build, layers, dtype, options):
    """Traffic of the forward and of the backward pass."""
    model = build(mesh, layers=layers, hidden=HIDDEN, vocabulary=37, dropout=0.1, **options).to(
        dtype
    )
    ids = torch.arange(BATCH * POSITIONS).view(BATCH, POSITIONS)
    mpu.dropout_state.set(0, 0)
    with between_hosts(), Traffic() as forward:
        loss = model(ids, ids)
    with between_hosts(), Traffic() as backward:
        loss.backward()
    return forward.bytes, backward.bytes


def per_layer(run_mesh, tp, build, dtype, **options):
    """(forward, backward) traffic that one more layer adds."""
    one, three = (run_mesh(tp, traffic, build, layers, dtype, options)[0] for layers in (1, 3))
    return [
        {
            name: (many.get(name, 0) - few.get(name, 0)) / 2
            for name in many
            if many[name] != few.get(name, 0)
        }
        for few, many in zip(one, three, strict=True)
    ]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_without_sequence_parallelism(tp, recompute, run_mesh):
    n = BATCH * POSITIONS * HIDDEN * 4
    forward, backward = per_layer(
        run_mesh, tp, build_transformer, torch.float32, recompute=recompute
    )
    assert forward == {"all-reduce": 2 * n}
    assert backward == {"all-reduce": (4 if recompute == "full" else 2) * n}


def traffic_on_one_host(mesh, dtype, sequence_parallel):
    """What a step sends between hosts, and what it puts into shared memory and sends beside that on one host."""
    both = traffic(mesh, build_transformer, 1, dtype, {"sequence_parallel": sequence_parallel})
    between = {name: sum(part.get(name, 0) for part in both) for name in {**both[0], **both[1]}}
    model = build_transformer(
        mesh,
        layers=1,
        hidden=HIDDEN,
        vocabulary=37,
        dropout=0.1,
        sequence_parallel=sequence_parallel,
    ).to(dtype)
    ids = torch.arange(BATCH * POSITIONS).view(BATCH, POSITIONS)
    shared_memory.find(torch.zeros(1), mesh.tp_group)  # opening the memory sends a few numbers
    mpu.dropout_state.set(0, 0)
    with Traffic() as sent, SharedTraffic() as shared:
        model(ids, ids).backward()
    return between, shared.bytes, sent.bytes


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_of_one_host_exchange_the_same_through_memory(tp, sequence_parallel, run_mesh):
    for between, shared, sent in run_mesh(
        tp, traffic_on_one_host, torch.float32, sequence_parallel
    ):
        assert shared == between
        assert sent == {}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("recompute", by_turns(["none", "selective", "full"], 2))
def test_a_layer_with_sequence_parallelism(tp, recompute, run_mesh):
    n = BATCH * POSITIONS * HIDDEN * 4
    forward, backward = per_layer(
        run_mesh, tp, build_transformer, torch.float32, recompute=recompute, sequence_parallel=True
    )
    again = 2 * n if recompute == "full" else 0
    assert forward == {"all-gather": 2 * n, "reduce-scatter": 2 * n}
    assert backward == {
        "all-gather": 4 * n + again,  # two of gradients, two of the inputs that are kept as parts
        "reduce-scatter": 2 * n + again,
        "all-reduce": 2 * 2 * HIDDEN * 4,  # weight and bias of two norms
    }


def test_bf16_over_many_ranks_sends_what_a_ring_would(run_mesh):
    """An all-reduce is a reduce-scatter and an all-gather: here an all-to-all, an fp32 sum, and an all-gather."""
    n = BATCH * POSITIONS * HIDDEN * 2
    build = build_transformer
    assert (
        per_layer(run_mesh, 4, build, torch.bfloat16)
        == [{"reduce-scatter": 2 * n, "all-gather": 2 * n}] * 2
    )
    assert per_layer(run_mesh, 2, build, torch.bfloat16) == [{"all-reduce": 2 * n}] * 2


def native_operations(mesh, dtype, sequence_parallel):
    """The c10d operations of a step in which the backend adds, and the reduction that "auto" means on a GPU."""
    with between_hosts(collectives._SMALL), native(mesh), Traffic() as both:
        options = {"sequence_parallel": sequence_parallel}
        model = build_transformer(
            mesh, layers=1, hidden=HIDDEN, vocabulary=37, dropout=0.1, **options
        ).to(dtype)
        ids = torch.arange(BATCH * POSITIONS).view(BATCH, POSITIONS)
        mpu.dropout_state.set(0, 0)
        model(ids, ids).backward()
    cpu, meta = (
        torch.empty(0),
        torch.empty(0, device="meta"),
    )  # meta stands for any device that is not a CPU
    return both.operations, [
        collectives._adds_natively(tensor, mesh.tp_group) for tensor in (cpu, meta)
    ]


@contextlib.contextmanager
def native(mesh):
    mpu.set_reduction(mesh.tp_group, "native")
    try:
        yield
    finally:
        mpu.set_reduction(mesh.tp_group, "auto")


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_native_sums_are_the_backends_own(tp, sequence_parallel, run_mesh):
    """No all-to-all, whose pieces this library would add, in any dtype and of any size."""
    expected = {
        "allreduce_",
        "_allgather_base_",
        *(["_reduce_scatter_base_"] if sequence_parallel else []),
    }
    for operations, automatic in run_mesh(tp, native_operations, torch.bfloat16, sequence_parallel):
        assert operations == expected
        assert automatic == [False, True]


def rounding(mesh):
    """Sums in bf16 of 256, 1, 1, 1: 259 rounds to 260, but a sum that is rounded at every hop never leaves 256."""
    tensor = torch.full([4], 256.0 if mesh.tp_rank == 0 else 1.0, dtype=torch.bfloat16)
    with between_hosts():
        exact = collectives.start_all_reduce(tensor.clone(), mesh.tp_group)()
        with native(mesh):
            added = collectives.start_all_reduce(tensor.clone(), mesh.tp_group)()
    return exact.tolist(), added.tolist()


def test_sums_in_fp32_are_rounded_once(run_mesh):
    for exact, added in run_mesh(4, rounding):
        assert exact == [260.0] * 4
        assert added != exact  # so the choice makes a difference


def sums(mesh, dtype, elements):
    """What two ways of sending make of the same tensors, and the bytes that they sent."""
    rank = mesh.tp_rank

    def summed():
        tensor = (
            torch.arange(elements, dtype=dtype)
            .remainder(13)
            .div(8)
            .add(rank)
            .unflatten(0, (2, -1))
            .t()
        )
        with Traffic() as sent:
            return collectives.start_all_reduce(tensor, mesh.tp_group)(), sent.bytes

    with between_hosts():
        large = summed()
    with between_hosts(collectives._SMALL):
        return summed(), large


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str
)
def test_small_tensors_are_exchanged_whole(tp, dtype, run_mesh):
    """With sums that every dtype holds exactly."""
    results = run_mesh(tp, sums, dtype, 106)
    expected = sum(
        torch.arange(106, dtype=dtype).remainder(13).div(8).add(rank) for rank in range(tp)
    )
    for (small, sent), (large, _) in results:
        assert torch.equal(small, expected.unflatten(0, (2, -1)).t().to(small.dtype))
        assert torch.equal(large, small)
        size = small.numel() * small.element_size()
        assert sent == (
            {"reduce-scatter": tp * size} if small.is_floating_point() else {"all-reduce": size}
        )
    elements = 2 * collectives._SMALL
    (_, sent), (_, as_large) = run_mesh(tp, sums, dtype, elements)[0]
    assert sent == as_large


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding_head_and_loss(tp, sequence_parallel, run_mesh):
    """Everything but the layers: no term has the size of the vocabulary."""
    n, tokens = BATCH * POSITIONS * HIDDEN * 4, BATCH * POSITIONS
    loss = tp * 2 * tokens * 4  # log-sum-exp and target logit of every token, from every rank
    forward, backward = run_mesh(
        tp, traffic, build_transformer, 0, torch.float32, {"sequence_parallel": sequence_parallel}
    )[0]
    if sequence_parallel:
        assert forward == {"reduce-scatter": n, "all-gather": n + loss}
        assert backward == {"all-gather": 2 * n, "reduce-scatter": n, "all-reduce": 2 * HIDDEN * 4}
    else:
        assert forward == {"all-reduce": n, "all-gather": loss}
        assert backward == {"all-reduce": n}


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_groups_of_one_never_communicate(tp, sequence_parallel, run_mesh):
    mesh_sizes = {"data": 1} if tp == 1 else {"data": 4}
    options = {"sequence_parallel": sequence_parallel}
    for both in run_mesh(1, traffic, build_transformer, 1, torch.float32, options, **mesh_sizes):
        assert both == ({}, {})


class Events(TorchDispatchMode):
    """The order of products, and of collectives started and waited for."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::bmm", "aten::addmm"):
            self.events.append("product")
        return func(*args, **(kwargs or {}))

    def watch(self, name, collective):
        events = self.events

        class Watched:
            def __init__(self, work):
                self.work = work

            def wait(self):
                events.append(f"wait {name}")
                self.work.wait()

        def start(*args, async_op, **kwargs):
            assert async_op
            events.append(f"start {name}")
            return Watched(collective(*args, async_op=True, **kwargs))

        return start

    def watch_memory(self, start):
        def started(channel, kind, *tensors):
            name = ("all-reduce", "all-gather", "reduce-scatter")[kind]
            self.events.append(f"start {name}")
            finish = start(channel, kind, *tensors)

            def finished():
                self.events.append(f"wait {name}")
                return finish()

            return finished

        return started


def backward_events(mesh, sequence_parallel, way):
    layer = mpu.ColumnParallelLinear(
        8, 4 * mesh.tp_size, sequence_parallel=sequence_parallel, mesh=mesh
    )
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.ones_(layer.bias)
    output = layer(torch.ones(2, 4, 8, requires_grad=True))
    original = (
        collectives.dist.all_reduce,
        collectives._all_gather,
        collectives.dist.all_to_all_single,
    )
    start, reduce_scatter = shared_memory.start, collectives._reduce_scatter
    hosts = contextlib.nullcontext() if way == "memory" else between_hosts()
    with hosts, native(mesh) if way == "native" else contextlib.nullcontext(), Events() as mode:
        collectives.dist.all_reduce = mode.watch("all-reduce", original[0])
        collectives._all_gather = mode.watch("all-gather", original[1])
        collectives.dist.all_to_all_single = mode.watch("reduce-scatter", original[2])
        collectives._reduce_scatter = mode.watch("reduce-scatter", reduce_scatter)
        shared_memory.start = mode.watch_memory(start)
        try:
            output.sum().backward()
        finally:
            collectives._reduce_scatter = reduce_scatter
            (
                collectives.dist.all_reduce,
                collectives._all_gather,
                collectives.dist.all_to_all_single,
            ) = original
            shared_memory.start = start
    return mode.events


@pytest.mark.parametrize("way", ["memory", "fp32", "native"])
def test_the_input_gradient_is_summed_while_the_weight_gradient_is_computed(way, run_mesh):
    for events in run_mesh(2, backward_events, False, way):
        assert events == ["product", "start all-reduce", "product", "wait all-reduce"]


@pytest.mark.parametrize("way", ["memory", "fp32", "native"])
def test_under_sequence_parallelism_the_gather_is_hidden_too(way, run_mesh):
    for events in run_mesh(2, backward_events, True, way):
        assert events == [
            "start all-gather",
            "product",  # the input gradient
            "wait all-gather",
            "start reduce-scatter",
            "product",  # the weight gradient
            "wait reduce-scatter",
        ]
