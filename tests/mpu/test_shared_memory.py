"""Collectives through shared memory: exact sums, messages cut into chunks, ranks that differ, die, stop or are late."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardzoo.mpu import collectives, shared_memory

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
KINDS = ["all-reduce", "all-gather", "reduce-scatter"]


@contextlib.contextmanager
def new_channel(group, slot=1024, slots=3, **changes):
    """A channel of the group with other slots than the usual ones."""
    kept = shared_memory._channels.pop(group, None)
    changes = {"SLOT": slot, "SLOTS": slots, **changes}
    before = {name: getattr(shared_memory, name) for name in changes}
    for name, value in changes.items():
        setattr(shared_memory, name, value)
    try:
        channel = shared_memory.find(torch.zeros(1), group)
        assert channel is not None
        yield channel
    finally:
        for name, value in before.items():
            setattr(shared_memory, name, value)
        shared_memory._channels.pop(group, None)
        if kept is not None:
            shared_memory._channels[group] = kept


def inputs(rank, size, lengths, dtype):
    """Every collective's tensor, of any rank: values whose sums round."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    tensors = [torch.randn(length * size, generator=generator) * 100 for length in lengths]
    return [tensor.to(dtype) for tensor in tensors]


def begin(kind, tensor, group):
    if kind == "all-reduce":
        return collectives.start_all_reduce(tensor.clone(), group)
    start = (
        collectives.start_all_gather if kind == "all-gather" else collectives.start_reduce_scatter
    )
    return start(tensor, 0, group)


def exchange(lengths, kinds, dtype, order, slot, slots):
    """Starts all collectives, then finishes them in some order; None leaves one unfinished."""
    group, size = dist.group.WORLD, dist.get_world_size()
    with new_channel(group, slot, slots):
        for _ in range(2):  # the second time in slots that were used
            finish = [
                begin(kind, tensor, group)
                for kind, tensor in zip(
                    kinds, inputs(dist.get_rank(), size, lengths, dtype), strict=True
                )
            ]
            results = {index: finish[index]() for index in order}
    return results


def expected(kind, tensors, rank):
    size, dtype = len(tensors), tensors[0].dtype
    if kind == "all-gather":
        return torch.cat(tensors)
    wide = dtype if dtype in (torch.float64, torch.int32, torch.int64) else torch.float32
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = total + tensor.to(wide)
    total = total.to(dtype)
    return total if kind == "all-reduce" else total.chunk(size)[rank]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_have_the_bits_of_a_sum_in_rank_order(size, run_ranks):
    """Messages of several chunks and of one element; more chunks than slots; finished in any order, or never."""

    @given(
        data=st.data(),
        dtype=st.sampled_from(DTYPES),
        slots=st.integers(1, 4),
        slot=st.sampled_from([256, 1024]),
    )
    def check(data, dtype, slots, slot):
        count = data.draw(st.integers(1, 5))
        lengths = data.draw(st.lists(st.integers(1, 700), min_size=count, max_size=count))
        kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count))
        order = data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, count))]
        tensors = [inputs(rank, size, lengths, dtype) for rank in range(size)]
        for rank, results in enumerate(
            run_ranks(size, exchange, lengths, kinds, dtype, order, slot, slots)
        ):
            for index, result in results.items():
                wanted = expected(kinds[index], [own[index] for own in tensors], rank)
                assert torch.equal(result, wanted), (kinds[index], lengths[index])

    check()


@pytest.mark.parametrize("size", [2, 3])
def test_special_numbers(size, run_ranks):
    values = [float("nan"), float("inf"), -0.0, 3.3895e38, 2.0**-126, 65504.0, 1.0]

    def special(dtype):
        tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
        return collectives.start_all_reduce(tensor, dist.group.WORLD)()

    for dtype in DTYPES[:4]:
        tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
        for result in run_ranks(size, special, dtype):
            assert torch.equal(
                result.nan_to_num(7), expected("all-reduce", [tensor] * size, 0).nan_to_num(7)
            )
            assert torch.equal(result.isnan(), tensor.isnan())
            assert result[2].signbit()


def test_sixteen_ranks_on_fewer_cores(run_ranks):
    def work():
        group, rank = dist.group.WORLD, dist.get_rank()
        total = collectives.start_all_reduce(torch.full((100_001,), float(rank)), group)()
        gathered = collectives.start_all_gather(torch.tensor([rank]), 0, group)()
        return total.unique().tolist(), gathered.tolist()

    assert run_ranks(16, work, isolated=True) == [([120.0], list(range(16)))] * 16


def test_large_messages_need_little_memory_beside_them(run_ranks):
    def work():
        from resource import RUSAGE_SELF, getrusage

        group = dist.group.WORLD
        tensor = torch.ones(1 << 24)
        collectives.start_all_reduce(torch.ones(1 << 20), group)()
        before = getrusage(RUSAGE_SELF).ru_maxrss
        collectives.start_all_reduce(tensor, group)()
        kib = getrusage(RUSAGE_SELF).ru_maxrss - before
        return bool((tensor == 2).all()), kib

    for correct, kib in run_ranks(2, work, isolated=True):
        assert correct
        assert kib < 1 << 10


def count_rows(size, longest, kind):
    """Returns how many rows each rank sends to each: unequal numbers, or all to or from one rank, or to none."""
    if kind == "unequal":
        return [[(a * 5 + b * 3) % (longest + 1) for b in range(size)] for a in range(size)]
    kept = {
        "to one": lambda a, b: b == size - 1,
        "from one": lambda a, b: a == size - 1,
        "to none": lambda a, b: a == b,
    }[kind]
    return [[longest * kept(a, b) for b in range(size)] for a in range(size)]


def exchange_rows_of_several_kinds(slot):
    """Each number of rows in each type, through slots of another size, between other collectives."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    results = []
    with new_channel(group, slot):
        for longest_one in (0, 1, 7, 300):
            for kind in ("unequal", "to one", "from one", "to none"):
                counts = count_rows(size, longest_one, kind)
                longest = max(counts[a][b] for a in range(size) for b in range(size) if a != b)
                sent = counts[rank]
                received = [row[rank] for row in counts]
                for dtype in (torch.float32, torch.bfloat16, torch.int64):
                    rows = torch.arange(sum(sent) * 3).view(-1, 3) + 1000 * rank
                    rows = (rows % 251).to(dtype)
                    theirs = collectives.all_to_all_rows(rows, sent, received, group)
                    finish = collectives.start_all_reduce(torch.ones(500), group)
                    ours = collectives.all_to_all_rows(rows, sent, received, group, longest)
                    results.append(ours.dtype == dtype and torch.equal(ours, theirs))
                    results.append(finish().unique().tolist() == [size])
    return results


@pytest.mark.parametrize(("size", "slot"), [(2, 1024), (3, 192)])
def test_an_all_to_all_delivers_what_gloo_delivers(size, slot, run_ranks):
    assert all(all(results) for results in run_ranks(size, exchange_rows_of_several_kinds, slot))


def refuse_exchanges():
    group = dist.group.WORLD
    rows = torch.zeros(3, 2)
    with new_channel(group):
        for sent, received, longest in (
            ([1, 1], [1, 2], 2),  # 2 of 3 rows
            ([1, 2], [1, 2], 1),  # more than the longest
            ([1, 2], [2, 1], 2),  # what a rank keeps
        ):
            if dist.get_rank():
                sent, received = sent[::-1], received[::-1]
            with pytest.raises(ValueError, match=r"elements of an all-to-all|bytes instead of"):
                collectives.all_to_all_rows(rows, sent, received, group, longest)


def test_an_all_to_all_refuses_numbers_that_do_not_fit(run_ranks):
    run_ranks(2, refuse_exchanges)


def test_a_channel_refuses_tensors_that_do_not_fit():
    """Of a channel of one rank, so that nothing is waited for."""
    file = os.memfd_create("channel")
    os.ftruncate(file, shared_memory.Channel.count_bytes(1, 1024, 2))
    channel = shared_memory.Channel(file, 0, [os.getpid()], 1024, 2, 1.0, 0.0)
    float32 = shared_memory.DTYPES.index(torch.float32)
    tensor = torch.arange(6.0)
    for kind in range(3):
        out = torch.empty(6)
        channel.finish(channel.start(kind, float32, tensor, out, 6))
        assert torch.equal(out, tensor)
        with pytest.raises(ValueError, match="has 24 bytes instead of 28"):
            channel.start(kind, float32, tensor, out, 7)
        with pytest.raises(ValueError, match="has 20 bytes instead of 24"):
            channel.start(kind, float32, tensor, out[:5], 6)
        with pytest.raises(ValueError, match="must be contiguous"):
            channel.start(kind, float32, torch.zeros(12)[::2], out, 6)
    with pytest.raises(ValueError, match="no collective of this number"):
        channel.start(3, float32, tensor, tensor, 6)
    with pytest.raises(ValueError, match="no dtype of this number"):
        channel.start(0, 6, tensor, tensor, 6)
    for capacity, slots, ranks in ((100, 2, 1), (64, 2, 2), (1024, 0, 1), (1 << 13, 2, 65)):
        with pytest.raises(ValueError, match=r"slot|ranks"):
            shared_memory.Channel(file, 0, [os.getpid()] * ranks, capacity, slots, 1.0, 0.0)
    os.close(file)


def test_all_ranks_or_none(run_ranks):
    """Ranks on several hosts, or one that cannot open the memory: every rank uses torch.distributed."""

    def work(name, value):
        group, rank = dist.new_group(), dist.get_rank()
        original = getattr(shared_memory, name)
        if rank == 1:
            setattr(shared_memory, name, value)
        try:
            assert shared_memory.find(torch.zeros(1), group) is None
            return collectives.start_all_reduce(torch.ones(3), group)().tolist()
        finally:
            setattr(shared_memory, name, original)

    for name, value in (
        ("_host", lambda: [1, 2]),
        ("compiled", None),
        ("_map_file", lambda *_: None),
    ):
        assert run_ranks(3, work, name, value) == [[3.0] * 3] * 3


@pytest.mark.parametrize(("limit", "most"), [("RLIMIT_NOFILE", 3), ("RLIMIT_FSIZE", 4096)])
def test_limits_of_files_leave_all_ranks_without_it(limit, most, run_ranks):
    """`ulimit -n` and `ulimit -f`, on the rank that makes the file, or on one that opens it."""

    def work(limited):
        import resource

        group = dist.new_group()
        dist.barrier(group)  # gloo has its own files
        kind = getattr(resource, limit)
        before = resource.getrlimit(kind)
        if dist.get_rank() == limited:
            resource.setrlimit(kind, (most, before[1]))
        try:
            channel = shared_memory.find(torch.zeros(1), group)
        finally:
            resource.setrlimit(kind, before)
        assert (channel is None) == (limited == 0 or limit == "RLIMIT_NOFILE")
        return collectives.start_all_reduce(torch.ones(3), group)().tolist()

    for limited in (0, 1):
        assert run_ranks(3, work, limited) == [[3.0] * 3] * 3


def test_the_first_rank_without_the_compiled_part(run_ranks):
    def work():
        group = dist.new_group()
        compiled = shared_memory.compiled
        if dist.get_rank() == 0:
            shared_memory.compiled = None
        try:
            return shared_memory.find(torch.zeros(1), group)
        finally:
            shared_memory.compiled = compiled

    assert run_ranks(2, work) == [None, None]


def test_only_the_file_of_this_group_is_opened(run_ranks):
    """Two copies of one virtual machine may have the same boot id, process ids and descriptors."""

    def work():
        file = os.memfd_create("shardzoo-5")
        os.ftruncate(
            file, shared_memory.Channel.count_bytes(1, shared_memory.SLOT, shared_memory.SLOTS)
        )
        path = f"/proc/self/fd/{file}"
        found = [
            shared_memory._map_file(path, name, [os.getpid()], dist.group.WORLD) is not None
            for name in (5, 55, 4)
        ]
        os.close(file)
        return found

    assert run_ranks(1, work) == [[True, False, False]]


def test_memory_is_taken_at_once_where_linux_promises_no_more_than_there_is(monkeypatch, tmp_path):
    def make_file():
        file = shared_memory._make_file(1, 2)
        if file < 0:
            return None
        status = os.fstat(file)
        os.close(file)
        return status.st_blocks * 512 / status.st_size

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    promises = tmp_path / "overcommit_memory"
    monkeypatch.setattr(shared_memory, "OVERCOMMIT", promises)
    promises.write_text("0\n")
    assert make_file() == 0
    promises.write_text("2\n")
    assert make_file() >= 1
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert make_file() is None


@pytest.mark.parametrize("other", ["all-gather", "all-to-all", "longer", "dtype"])
def test_ranks_in_different_collectives_say_so(other, run_ranks):
    def call(group):
        if dist.get_rank() == 0:
            return collectives.start_all_reduce(torch.zeros(64), group)()
        if other == "all-gather":
            return collectives.start_all_gather(torch.zeros(64), 0, group)()
        if other == "all-to-all":
            return collectives.all_to_all_rows(torch.zeros(2, 3), [1, 1], [1, 1], group, 1)
        if other == "longer":
            return collectives.start_all_reduce(torch.zeros(5000), group)()
        return collectives.start_all_reduce(torch.zeros(64, dtype=torch.int32), group)()

    def work():
        with (
            new_channel(dist.group.WORLD),
            pytest.raises(RuntimeError, match="all ranks must call the same") as error,
        ):
            call(dist.group.WORLD)
        return str(error.value)

    first, _ = run_ranks(2, work, isolated=True)
    assert first.startswith("all-reduce of 256 bytes: rank 1 of the group (process ")
    if other == "longer":
        assert "is in an all-reduce of 20000 bytes" in first
    elif other != "dtype":
        assert f"is in an {other} of" in first


def test_a_rank_that_ended_is_named_at_once(tmp_path, run_ranks):
    def work():
        group, rank = dist.group.WORLD, dist.get_rank()
        collectives.start_all_reduce(torch.ones(3), group)()
        processes = collectives.start_all_gather(torch.tensor([os.getpid()]), 0, group)().tolist()
        child = os.fork() if rank == 0 else 0  # a process that lives on, as a data worker may
        if child == 0 and rank == 0:
            time.sleep(60)
        if rank == 1:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            time.sleep(60)
        start = time.monotonic()
        with pytest.raises(
            RuntimeError, match=f"rank 1 of the group .process {processes[1]}. has ended"
        ):
            collectives.start_all_reduce(torch.ones(1000), group)()
        if child:
            os.kill(child, signal.SIGKILL)
        seconds = time.monotonic() - start
        (tmp_path / str(rank)).write_text(str(seconds))

    with pytest.raises(AssertionError):  # of the rank that died
        run_ranks(3, work, isolated=True)
    for rank in (0, 2):
        assert float((tmp_path / str(rank)).read_text()) < 3


def test_a_late_rank_is_named_after_the_timeout(run_ranks):
    def work():
        group, rank = dist.group.WORLD, dist.get_rank()
        shared_memory.set_timeout(group, 900)
        with new_channel(group) as channel:
            shared_memory.set_timeout(group, 0.5)
            message = ""
            if rank == 0:
                with pytest.raises(RuntimeError) as error:
                    collectives.start_all_reduce(torch.ones(3), group)()
                message = str(error.value)
            dist.barrier()
            assert channel is not None
        return message

    first, _ = run_ranks(2, work, isolated=True)
    assert first.startswith("all-reduce of 12 bytes: rank 1 of the group (process ")
    assert first.endswith("did not take part within 0.5 seconds")


def test_a_signal_handler_runs_while_a_rank_waits(run_ranks):
    def work():
        group, rank = dist.group.WORLD, dist.get_rank()
        collectives.start_all_reduce(torch.ones(3), group)()
        if rank == 1:
            time.sleep(1.5)
            return collectives.start_all_reduce(torch.ones(3), group)().tolist()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the workers ignore it
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        start, finish = time.monotonic(), collectives.start_all_reduce(torch.ones(3), group)
        with pytest.raises(KeyboardInterrupt):
            finish()
        assert time.monotonic() - start < 1
        return finish().tolist()  # what was interrupted can go on

    assert run_ranks(2, work, isolated=True) == [[2.0] * 3] * 2


def test_a_signal_handler_cannot_call_a_collective_in_between(run_ranks):
    def work():
        group, rank = dist.group.WORLD, dist.get_rank()
        collectives.start_all_reduce(torch.ones(3), group)()
        if rank == 1:
            time.sleep(1)
            return collectives.start_all_reduce(torch.ones(3), group)().tolist()
        signal.signal(
            signal.SIGALRM, lambda *_: collectives.start_all_reduce(torch.ones(5), group)()
        )
        finish = collectives.start_all_reduce(torch.ones(3), group)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(
            RuntimeError, match="a signal handler called a collective while this thread waits"
        ):
            finish()
        return finish().tolist()

    assert run_ranks(2, work, isolated=True) == [[2.0] * 3] * 2


def test_waiting_takes_no_processor_time(run_ranks):
    def work():
        group, rank = dist.group.WORLD, dist.get_rank()
        collectives.start_all_reduce(torch.ones(3), group)()
        before = time.thread_time()
        if rank == 1:
            time.sleep(1)
        collectives.start_all_reduce(torch.ones(3), group)()
        return time.thread_time() - before

    assert max(run_ranks(2, work)) < 0.1


def test_killed_ranks_leave_nothing(run_ranks):
    """Anonymous memory has no name that could stay."""

    def names():
        return {path.name for path in Path("/dev/shm").glob("*")}

    def killed():
        group = dist.group.WORLD
        if dist.get_rank() == 1:
            threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        rank = dist.get_rank()
        while True:
            collectives.start_all_reduce(torch.ones(50_000), group)()
            received = [100, 100] if rank == 0 else [200, 200]
            collectives.all_to_all_rows(torch.ones(300, 100), [100, 200], received, group, 200)

    before = names()
    for _ in range(3):
        with pytest.raises(AssertionError):
            run_ranks(2, killed, isolated=True)
    assert {name for name in names() - before if "shardzoo" in name} == set()
