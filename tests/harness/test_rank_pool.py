"""The harness itself: results, tracebacks, hangs and deaths."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPools

OFFSET = 10  # a module-level name that the shipped functions use


def _sum_of_ranks(extra):
    value = torch.tensor([dist.get_rank() + OFFSET + extra])
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


def test_results_come_back_in_rank_order(run_ranks):
    assert run_ranks(3, _sum_of_ranks, 1) == [(0, 36), (1, 36), (2, 36)]


def test_closures_and_mesh(run_mesh):
    factor = 7
    assert run_mesh(2, lambda mesh, x: (mesh.tp_rank, mesh.dp_rank, x * factor), 3, data=2) == [
        (0, 0, 21),
        (1, 0, 21),
        (0, 1, 21),
        (1, 1, 21),
    ]


def test_a_call_costs_milliseconds(run_ranks):
    run_ranks(2, _sum_of_ranks, 0)
    start = time.perf_counter()
    for _ in range(20):
        run_ranks(2, _sum_of_ranks, 0)
    assert (time.perf_counter() - start) / 20 < 0.1  # about 2 ms on a quiet machine


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_are_stopped_between_calls_and_end_with_the_pool():
    pools = RankPools()
    numbers = pools.run_ranks(2, os.getpid)

    def states():
        stats = [Path(f"/proc/{number}/stat") for number in numbers]
        return [stat.read_text().rpartition(")")[2].split()[0] for stat in stats if stat.exists()]

    def become(expected):
        end = time.monotonic() + 20
        while states() != expected and time.monotonic() < end:
            time.sleep(0.01)
        assert states() == expected

    become(["T", "T"])
    assert pools.run_ranks(2, os.getpid) == numbers
    become(["T", "T"])
    pools.close()
    become([])


def test_every_failing_rank_shows_its_traceback(run_ranks):
    def fail():
        if dist.get_rank() != 1:
            raise KeyError(f"broken on {dist.get_rank()}")

    with pytest.raises(AssertionError) as failure:
        run_ranks(3, fail)
    text = str(failure.value)
    assert "rank 0 of 3 failed" in text
    assert "KeyError: 'broken on 2'" in text
    assert "in fail" in text
    assert "rank 1 of 3 returned" in text


def test_a_stuck_collective_names_its_ranks_and_the_pool_is_replaced(run_ranks):
    def hang():
        if dist.get_rank() == 1:
            raise RuntimeError("rank 1 never joins")
        dist.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        run_ranks(3, hang)
    assert time.monotonic() - start < 8
    text = str(failure.value)
    assert "rank 0 of 3 is stuck" in text
    assert "rank 2 of 3 is stuck" in text
    assert "in hang" in text  # the stack of the stuck rank
    assert "rank 1 never joins" in text
    assert run_ranks(3, _sum_of_ranks, 0)[0] == (0, 33)


def test_a_dead_rank_is_named(run_ranks):
    with pytest.raises(
        AssertionError, match="rank 0 of 1 failed:\nthe process died with exit code 3"
    ):
        run_ranks(1, lambda: os._exit(3))
    assert run_ranks(1, dist.get_world_size) == [1]


def test_an_isolated_run_leaves_nothing_behind(run_ranks):
    def remember():
        os.environ["HARNESS_LEFTOVER"] = "1"
        return os.getpid()

    [isolated] = run_ranks(1, remember, isolated=True)
    assert run_ranks(1, lambda: (os.getpid() != isolated, os.environ.get("HARNESS_LEFTOVER"))) == [
        (True, None)
    ]


def test_functions_that_mention_torch_ops(run_ranks):
    assert run_ranks(1, lambda: float(torch.ops.aten.neg(torch.ones(())))) == [-1.0]


def test_a_rank_that_returns_while_others_wait_is_seen(run_ranks, monkeypatch):
    monkeypatch.setattr("rank_pool.SECONDS_AFTER_SUCCESS", 0.5)

    def leave():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(
        AssertionError, match=r"rank 0 of 2 is stuck(.|\n)*in leave(.|\n)*rank 1 of 2 returned"
    ):
        run_ranks(2, leave)


def test_ranks_that_never_end_are_stopped_at_the_timeout(run_ranks):
    def spin():
        while True:
            pass

    with pytest.raises(
        AssertionError, match=r"rank 0 of 2 is stuck(.|\n)*in spin(.|\n)*rank 1 of 2 is stuck"
    ):
        run_ranks(2, spin, timeout=0.5)
