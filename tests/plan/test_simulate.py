"""The event simulation, against closed formulas."""

from __future__ import annotations

import time
from math import exp

import numpy as np
import pytest

from shardzoo.plan import CLUSTERS, Constants
from shardzoo.plan.cost import ring_all_reduce
from shardzoo.plan.simulate import Failures, pipeline_makespan, ring_seconds, save_interval, useful_share
from shardzoo.trainer.estimate import bubble


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 4), (5, 13), (8, 64), (7, 3)])
def test_equal_stages_idle_as_long_as_the_formula_says(stages, micro_batches):
    forward, backward = np.full((1, stages), 1.0), np.full((1, stages), 2.0)
    whole = pipeline_makespan(forward, backward, micro_batches)
    assert 1 - 3 * micro_batches / whole == pytest.approx(bubble(stages, micro_batches), rel=1e-9, abs=1e-12)


def test_the_slowest_stage_sets_the_pace():
    forward = np.array([[1.0, 1.0, 1.5, 1.0]])
    assert pipeline_makespan(forward, 2 * forward, 40) == pytest.approx(40 * 4.5 + 3 * 3, rel=0.01)


def test_one_slow_replica_delays_all():
    forward = np.ones((4, 3))
    forward[2] *= 1.2
    assert pipeline_makespan(forward, 2 * forward, 6) == pytest.approx(1.2 * 3 * 8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 100])
def test_a_ring_takes_as_long_as_the_formula_says(ranks):
    link = CLUSTERS["h100"].network
    expected = ring_all_reduce(1e9, ranks, link, Constants(link=1.0))
    assert ring_seconds(1e9, np.full(ranks, link.bandwidth), link.latency) == pytest.approx(expected, rel=1e-9)


def test_one_slow_link_slows_the_ring():
    bandwidths = np.full(16, 1e9)
    bandwidths[5] = 5e8
    assert ring_seconds(1e9, bandwidths, 0.0) == pytest.approx(2 * 15 / 16 * 2, rel=0.01)


def test_ten_thousand_ranks_take_seconds():
    draw, started = np.random.default_rng(1), time.perf_counter()
    forward = draw.lognormal(0, 0.05, (625, 16))  # 10,000 pipeline ranks
    pipeline_makespan(forward, 2 * forward, 128, 0.01)
    ring_seconds(1e9, draw.lognormal(23, 0.05, 10_000), 1e-5)
    assert time.perf_counter() - started < 30


def test_the_save_interval_is_the_best_of_those_simulated():
    failures, devices, year = Failures(device_mtbf=3e8, save=60, restart=300), 4096, 3e7
    best = save_interval(failures, devices)
    shares = {factor: useful_share(failures, devices, factor * best, seconds=year) for factor in (0.25, 1, 4)}
    assert max(shares, key=lambda factor: shares[factor]) == 1
    # Exponential failures: an interval is repeated until it ends without one; each attempt but the last is lost.
    mean, period = 3e8 / devices, best + 60
    lost = mean * (exp(period / mean) - 1) + (exp(period / mean) - 1) * (mean * (exp(300 / mean) - 1))
    assert shares[1] == pytest.approx(best / lost, rel=0.01)


def test_impossible_failures_are_refused():
    with pytest.raises(ValueError, match="save must be above 0"):
        Failures(device_mtbf=1.0, save=0.0, restart=1.0)
