"""The event simulation, against closed formulas."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from math import exp

import numpy as np
import pytest
from every_case import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from shardzoo.cli.main import main
from shardzoo.models import find_config
from shardzoo.plan import CLUSTERS, PlannedRun, Rates, step_time
from shardzoo.plan.cost import message_time, ring_all_reduce, stage_times
from shardzoo.plan.layouts import PlanRequest, build_network, list_layouts
from shardzoo.plan.simulate import (
    Failures,
    Stragglers,
    _list_events,
    forecast_run,
    pipeline_ends,
    ring_ends,
    run_seconds,
    save_interval,
    simulate_step,
    young_interval,
)
from shardzoo.trainer.estimate import bubble
from shardzoo.trainer.estimate.pipeline import in_flight

FAST = replace(CLUSTERS["a100"].network, bandwidth=1e18, latency=0.0)


def alike(stages: int, micro_batches: int, seconds: float, replicas: int = 1) -> np.ndarray:
    return np.full((micro_batches, stages, replicas), seconds)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.floats(0.01, 10), st.floats(0.01, 30))
def test_equal_stages_idle_as_long_as_the_formula_says(stages, micro_batches, forward, backward):
    ends = pipeline_ends(
        alike(stages, micro_batches, forward), alike(stages, micro_batches, backward)
    )
    work = (forward + backward) * micro_batches
    assert 1 - work / ends.max() == pytest.approx(
        bubble(stages, micro_batches), rel=1e-9, abs=1e-12
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(2, 9), st.integers(9, 40), st.floats(0.0, 1.0))
def test_messages_lie_on_the_path_of_the_first_and_the_last_micro_batch(
    stages, micro_batches, message
):
    """Each stage but the ends sends twice for a micro-batch; 1F1B takes M + P - 1 turns of the busiest stage."""
    ends = pipeline_ends(
        alike(stages, micro_batches, 1.0), alike(stages, micro_batches, 2.0), message
    ).max()
    turns = micro_batches + stages - 1
    assert 3 * turns + message * (turns - 1) - 1e-9 <= ends <= (3 + 2 * message) * turns + 1e-9


def test_the_slowest_stage_sets_the_pace():
    forward = alike(4, 40, 1.0)
    forward[:, 2] = 1.5
    assert pipeline_ends(forward, 2 * forward).max() == pytest.approx(40 * 4.5 + 3 * 3, rel=0.01)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 60), st.floats(1, 1e11), st.integers(0, 59), st.floats(0, 1))
def test_a_ring_takes_as_long_as_the_formula_says_after_its_last_rank(ranks, size, late, delay):
    link = CLUSTERS["h100"].network
    expected = ring_all_reduce(size, ranks, link, Rates(link=1.0))
    begun = np.zeros((2, ranks))
    begun[:, late % ranks] = delay
    ends = ring_ends(begun, np.full(ranks, size / ranks / link.bandwidth + link.latency))
    assert ends.max(-1) == pytest.approx(delay + expected, rel=1e-9)


def test_one_slow_link_slows_the_ring():
    hops = np.full(16, 1.0)
    hops[5] = 2.0
    assert ring_ends(np.zeros(16), hops).max() == pytest.approx(2 * 15 * 2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "device", "asked", "within"),
    [
        ("gpt2-xl", "a100", PlanRequest(64, 512, 1024), 0.01),
        ("glm-10b", "v100", PlanRequest(128, 1024, 1024), 0.01),
        ("bert-large-uncased", "mi300x", PlanRequest(24, 240, 510), 0.01),
        (
            "mt5-xxl",
            "h100",
            PlanRequest(24, 240, 512, 120),
            0.15,
        ),  # unequal stages: the formula is an upper bound
    ],
)
def test_a_step_takes_as_long_as_the_formulas_say(name, device, asked, within):
    """Without stragglers; formulas count one message too many for the first and the last stage."""
    network, cluster = build_network(find_config(name)), CLUSTERS[device]
    runs = list(list_layouts(find_config(name), asked, 8))
    for run in random.Random(0).sample(runs, 60):
        simulated, formulas = simulate_step(network, run, cluster), step_time(network, run, cluster)
        allowed = 1e-9 if run.pipeline == 1 else within
        assert (1 - allowed) * formulas.total - formulas.pipeline_messages / 2 <= simulated, run
        assert simulated <= (1 + min(allowed, 0.01)) * formulas.total, run
        if run.pipeline > 1:
            unhindered = replace(cluster, network=FAST, inside=FAST)
            total = step_time(network, run, unhindered).total
            assert simulate_step(network, run, unhindered) == pytest.approx(total, rel=within), run


def test_stages_of_an_encoder_and_of_a_decoder_take_different_times():
    """Decoder blocks also attend to the source, so a pipeline of two waits for the second stage."""
    network = build_network(find_config("t5-11b"))
    run = PlannedRun(gpus=16, global_batch=64, length=512, pipeline=2, tensor=8)
    first, second = stage_times(network, run, CLUSTERS["a100"])
    assert second.total > 1.2 * first.total
    step = step_time(network, run, CLUSTERS["a100"])
    turn = second.total + message_time(network, run, CLUSTERS["a100"])
    work = (
        step.products + step.memory + step.launches + step.tensor_parallel + step.pipeline_messages
    )
    assert work == pytest.approx(run.micro_batches * turn)
    assert step.bubble == pytest.approx(turn - second.total + first.total)


def test_one_slow_device_delays_all():
    network, cluster = build_network(find_config("gpt2-xl")), CLUSTERS["a100"]
    run = PlannedRun(gpus=64, global_batch=256, micro_batch=2, tensor=2, pipeline=4)
    quick = simulate_step(network, run, cluster)
    every = simulate_step(
        network, run, cluster, stragglers=Stragglers(slow_share=1.0, slowdown=1.5)
    )
    some = simulate_step(
        network, run, cluster, stragglers=Stragglers(slow_share=0.05, slowdown=1.5)
    )
    assert quick < some <= every
    parts = step_time(network, run, cluster)
    busy = parts.products + parts.memory + parts.launches
    assert every - quick > 0.5 * busy


@pytest.mark.parametrize("jitter", [0.0, 1e-9])
@pytest.mark.parametrize(
    "run",
    [
        PlannedRun(gpus=8, global_batch=8, tensor=8),
        PlannedRun(gpus=8, global_batch=32, zero_stage=3),
    ],
)
def test_ranks_that_meet_in_each_pass_are_as_slow_as_the_slowest(run, jitter):
    network, cluster = build_network(find_config("gpt2-xl")), CLUSTERS["a100"]
    every = simulate_step(network, run, cluster, stragglers=Stragglers(1.0, 2.0))
    for seed in range(3):
        assert 0 < (np.random.default_rng(seed).random(8) < 0.3).sum() < 8
        some = simulate_step(
            network, run, cluster, stragglers=Stragglers(0.3, 2.0, jitter), seed=seed
        )
        assert some == pytest.approx(every, rel=1e-6)


def test_blocks_that_do_not_divide_are_dealt_as_evenly_as_possible():
    config = find_config("gpt2").with_changes(n_layer=70)
    network, run = build_network(config), PlannedRun(gpus=12, global_batch=12, pipeline=12)
    stages = [stage.total for stage in stage_times(network, run, CLUSTERS["a100"])]
    block = stages[0] / 5
    assert sorted(round(seconds / block, 6) for seconds in stages[:-1]) == [5] * 2 + [6] * 9
    assert stages[-1] > 6 * block


def test_a_stage_holds_as_many_micro_batches_as_the_memory_estimate_says():
    for stages, micro_batches in ((1, 4), (4, 2), (5, 9)):
        for stage in range(stages):
            opened = np.cumsum(
                [1 if kind == 0 else -1 for kind, _ in _list_events(stage, stages, micro_batches)]
            )
            assert opened.max() == in_flight(stage, stages, micro_batches)


def test_jitter_costs_what_the_slowest_of_the_ranks_costs():
    """One micro-batch on D replicas that then reduce their gradients: the expected maximum of D normal values."""
    network, cluster = build_network(find_config("gpt2")), CLUSTERS["a100"]
    run, jitter = PlannedRun(gpus=4096, global_batch=4096), 0.02
    (stage,) = stage_times(network, run, cluster)
    alone = simulate_step(network, run, cluster)
    times = [
        simulate_step(network, run, cluster, stragglers=Stragglers(jitter=jitter), seed=seed)
        for seed in range(8)
    ]
    draw = np.random.default_rng(1).normal(0, jitter, (2, 400, 4096))
    forward = stage.forward[0]
    slowest = (forward * np.exp(draw[0]) + (1 - forward) * np.exp(draw[1])).max(1).mean()
    late = sum(stage.busy) * (slowest - 1)
    assert np.mean(times) - alone == pytest.approx(late, rel=0.15)


@pytest.mark.before_release
def test_ten_thousand_ranks_take_seconds():
    network, cluster = build_network(find_config("llama-2-70b")), CLUSTERS["h100"]
    started = time.perf_counter()
    for run in (
        PlannedRun(gpus=10_240, global_batch=20_480, length=4096, tensor=8, pipeline=16),
        PlannedRun(gpus=10_000, global_batch=10_000, length=4096),
    ):
        simulate_step(network, run, cluster, stragglers=Stragglers(0.001, 1.2, 0.05))
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize(("save", "restart"), [(60, 300), (5, 0), (3000, 20_000)])
def test_the_save_interval_is_the_best_of_those_simulated(save, restart):
    failures, devices, work = Failures(device_mtbf=3e8, save=save, restart=restart), 4096, 3e7
    mean = 3e8 / devices
    best = save_interval(failures, devices)
    intervals = best * np.array([0.25, 1, 4])
    taken = run_seconds(failures, devices, intervals, work, runs=50).mean(1)
    assert taken.argmin() == 1
    # Exponential failures: an interval is repeated until it ends without one, and each failure restarts until one
    # restart ends (Daly 2006, equation 20).
    for interval, seconds in zip(intervals, taken, strict=True):
        expected = (
            work / interval * mean * exp(restart / mean) * (exp((interval + save) / mean) - 1)
        )
        assert seconds == pytest.approx(expected, rel=0.015)
    found = forecast_run(failures, devices, work)
    assert found.seconds == pytest.approx(taken[1], rel=0.01)
    assert 0.6 < found.interval / best < 1.7
    assert found.failures == pytest.approx(found.seconds / mean)
    assert young_interval(failures, devices) == pytest.approx(best, rel=0.25)


def test_a_run_without_failures_takes_its_saves():
    found = forecast_run(Failures(device_mtbf=10**12, save=10, restart=600), 8, 10**5)
    assert found.seconds == pytest.approx(1e5 * (1 + 10 / found.interval), rel=1e-6)


def test_impossible_values_are_refused():
    with pytest.raises(ValueError, match="a save must take more than 0 s"):
        Failures(device_mtbf=1.0, save=0.0, restart=1.0)
    with pytest.raises(ValueError, match="slowdown must be from 1 to 1000"):
        Stragglers(slowdown=0.5)
    with pytest.raises(ValueError, match="makes no progress"):
        forecast_run(Failures(device_mtbf=3.6e5, save=1.0, restart=600.0), 10_000, 1e6)
    network = build_network(find_config("gpt2"))
    with pytest.raises(ValueError, match="1F1B"):
        simulate_step(
            network, PlannedRun(gpus=2, global_batch=2, pipeline=2, chunks=2), CLUSTERS["a100"]
        )


def test_the_command_simulates_the_first_layout(capsys):
    words = [
        "plan",
        "gpt2-xl",
        "--gpus",
        "48",
        "--global-batch-size",
        "480",
        "--tokens",
        "1e12",
        "--simulate",
    ]
    assert (
        main([*words, "--json", "--mtbf", "2000", "--slow-share", "0.05", "--save-seconds", "20"])
        == 0
    )
    first, *others = json.loads(capsys.readouterr().out)
    found = first["simulated"]
    assert found["step_alike"] == pytest.approx(first["step"], rel=0.02)
    assert found["step"] > found["step_alike"]
    assert found["intervals"]["young"] == pytest.approx((2 * 20 * 2000 * 3600 / 48) ** 0.5)
    assert found["days"] > first["days"] * found["step"] / first["step"]
    assert found["days_95_percent"] > found["days"]
    assert not any("simulated" in row for row in others)
    assert main(words) == 0
    assert "Simulated on 48 ranks: a step takes" in capsys.readouterr().out
    assert main([*words, "--mtbf", "0"]) == 2
    assert "failures must be above 0 s, not 0.0" in capsys.readouterr().err
