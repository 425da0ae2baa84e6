"""Budgets of the operators that a training step launches, counted by benchmarks/launches.py on the meta device."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
from every_case import every_day

# the share of transformers' operators in a step with dropout and without, and the host's reads of the device
BUDGETS = {
    "gpt2": (0.40, 0.70, 0),
    "bert": (0.48, 0.75, 1),
    "roberta": (0.48, 0.75, 1),
    "t5": (0.28, 0.33, 0),
    "mt5": (0.26, 0.31, 0),
}


@pytest.fixture(scope="module")
def launches():
    path = Path(__file__).parents[2] / "benchmarks" / "launches.py"
    spec = importlib.util.spec_from_file_location("launches", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["launches"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["launches"]


@pytest.mark.parametrize(
    ("family", "dropout"),
    every_day([("gpt2", True), ("t5", False)], more=itertools.product(["bert", "roberta", "mt5"], (True, False))),
)
def test_a_step_launches_no_more_than_its_budget(launches, family, dropout):
    ours, theirs = launches.native(family, dropout, 8), launches.foreign(family, dropout, 8, "sdpa")
    *shares, reads = BUDGETS[family]
    assert ours.total() <= shares[not dropout] * theirs.total(), ours.most_common(20)
    assert sum(ours[name] for name in launches.READS) <= reads
    assert ours["shardzoo::cross_entropy_stats"] <= 1
