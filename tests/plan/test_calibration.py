"""`shardzoo plan --calibrate`: what is solved for is what a step's prediction uses, and processes measure it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import yaml

from shardzoo.cli.main import main
from shardzoo.plan import Rates, find_cluster, step_time
from shardzoo.plan.calibration import calibrate, cases, decoder, encoder_decoder, figures, solve
from shardzoo.plan.cost import update_time
from shardzoo.plan.layouts import build_network

ROOT = Path(__file__).parents[2]
SMALL = [
    decoder(128, 1, 512, 0.1, 1, 16),
    decoder(128, 2, 512, 0.0, 2, 64),
    encoder_decoder(128, 1, 512, 0.1, 1, 32, 8, 2),
]


def machine(**rates):
    """Returns a CPU with rates that no default has."""
    given = {
        "compute": 0.7,
        "attention": 0.4,
        "memory": 0.5,
        "update": 1.5,
        "launch": 3e-5,
        "dropout": 2e-9,
    }
    usual = Rates(step=2e-3, overlap=0.0, link=1.0, asynchronous=False)
    return replace(find_cluster("cpu"), rates=replace(usual, **given | rates))


def predicted_steps(cluster, itemsize):
    """Returns the seconds of the passes and of the update of each case, as `step_time` predicts them."""
    found = []
    for case in cases():
        network, run = build_network(case.config), case.run(itemsize)
        update = update_time(network, run, cluster) + cluster.rates.step
        found.append((step_time(network, run, cluster).total - update + cluster.rates.step, update))
    return found


@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_rates_of_a_machine_come_back_from_the_steps_that_they_make(itemsize, tmp_path):
    """Every product, byte, kernel, mask and update of a step is counted where the solution counts it."""
    cluster, path = machine(), tmp_path / "machine.yaml"
    solution = solve(cases(), predicted_steps(cluster, itemsize), itemsize)
    path.write_text(yaml.safe_dump(figures(1, itemsize, solution)))
    found = find_cluster(str(path))
    device, rates, peak = cluster.device, cluster.rates, cluster.device.peak_flops(itemsize)
    expected = {
        "peak": peak * rates.compute, "bandwidth": device.bandwidth * rates.memory,
        "attention": peak * rates.attention, "update": device.bandwidth * rates.update,
    }  # fmt: skip
    own = found.device
    assert {
        "peak": own.peak_flops(itemsize), "bandwidth": own.bandwidth,
        "attention": own.peak_flops(itemsize) * found.rates.attention, "update": own.bandwidth * found.rates.update,
    } == pytest.approx(expected, rel=1e-6)  # fmt: skip
    for name in ("launch", "dropout", "step"):
        assert getattr(found.rates, name) == pytest.approx(getattr(rates, name), rel=1e-6)
    assert not found.rates.asynchronous
    network, run = build_network(SMALL[2].config), SMALL[2].run(itemsize)
    assert step_time(network, run, found).total == pytest.approx(
        step_time(network, run, cluster).total, rel=1e-6
    )


def test_what_no_step_shows_takes_almost_no_time_but_is_a_number():
    solution = solve(cases(), predicted_steps(machine(dropout=0.0, launch=0.0), 4), 4)
    assert (solution > 0).all()
    assert np.isfinite(list(figures(1, 4, solution)["rates"].values())).all()


def test_launches_are_hidden_only_where_the_device_runs_behind_the_host():
    network, run = build_network(SMALL[1].config), SMALL[1].run(4)
    serial, behind = (
        step_time(network, run, machine(asynchronous=value, launch=1e-3)) for value in (False, True)
    )
    assert serial.launches - 2e-3 == pytest.approx(
        behind.launches - 2e-3 + behind.products + behind.memory
    )
    fast = machine(asynchronous=True, launch=1e-9)
    assert step_time(network, run, fast).launches == 2e-3  # the fixed time of a step


@pytest.mark.before_release
def test_two_processes_measure_this_machine(tmp_path):
    path = tmp_path / "two.yaml"
    found = calibrate(2, "fp32", SMALL)
    path.write_text(yaml.safe_dump(found))
    cluster = find_cluster(str(path))
    assert (cluster.node_size, cluster.device.name, cluster.rates.link) == (2, "cpu", 1.0)
    assert cluster.device.bandwidth > 1e6  # so small models show products and bytes as one
    assert 1e6 < cluster.inside.bandwidth < 1e12
    assert cluster.inside.latency < 1.0
    network, run = build_network(SMALL[1].config), SMALL[1].run(4)
    assert 1e-4 < step_time(network, run, cluster).total < 100


def test_the_command_plans_with_what_it_has_measured(tmp_path, capsys, monkeypatch):
    solution = solve(cases(), predicted_steps(machine(), 4), 4)
    asked = []
    monkeypatch.setattr(
        "shardzoo.cli.plan.calibrate", lambda *given: asked.append(given) or figures(2, 4, solution)
    )
    path = tmp_path / "two.yaml"
    assert main(["plan", "--calibrate", str(path), "--node-size", "2"]) == 0
    assert asked == [(2, None)]
    words = ["plan", "gpt2", "--gpus", "2", "--global-batch-size", "4", "--length", "256", "--json"]
    assert main([*words, "--device", str(path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert main([*words, "--calibrate", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == rows
    assert rows[0]["parts"]["launches"] > 2e-3


def test_the_docs_show_the_measured_steps():
    found = json.loads((ROOT / "benchmarks" / "results" / "calibration_cpu.json").read_text())
    page = (ROOT / "docs" / "performance.md").read_text()
    table = (ROOT / "benchmarks" / "results" / "cpu.md").read_text()
    errors = {name: row["predicted"] / row["measured"] - 1 for name, row in found.items()}
    for name, row in found.items():
        figures = f"{row['predicted']:.3f} | {row['measured']:.3f} | {errors[name]:+.1%}"
        assert f"| {row['model']} | {row['layout']} | {figures} |" in table
    sizes = sorted(map(abs, errors.values()))
    assert len(sizes) >= 20
    assert f"a median error of {median(sizes):.1%} and a worst of {sizes[-1]:.1%}" in page
    assert median(sizes) <= 0.15


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibrate", "machine.json"], "its name must end with .yaml or .yml, not machine.json"),
        (
            ["--calibrate", "machine.yaml", "--node-size", "0"],
            "0 processes cannot share this machine's",
        ),
        (["--calibrate", "machine.yaml", "--node-size", "100000"], "cores; use 1 to"),
        ([], "name a MODEL"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
