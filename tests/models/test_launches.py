"""Budgets of the operators that a training step launches, counted by benchmarks/launches.py on the meta device."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
from every_case import every_day

# The share of transformers' operators in a step with dropout and without, with attention as one operator and in parts;
# and the host's reads of the device.
BUDGETS = {
    "gpt2": ((0.62, 0.40), (0.63, 0.77), 0),
    "bert": ((0.83, 0.51), (0.87, 0.88), 0),
    "roberta": ((0.83, 0.51), (0.86, 0.88), 0),
    "t5": ((0.35, 0.26), (0.33, 0.32), 0),
    "mt5": ((0.32, 0.24), (0.30, 0.30), 0),
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
    every_day(
        [("gpt2", True), ("t5", False)],
        more=itertools.product(["bert", "roberta", "mt5"], (True, False)),
    ),
)
def test_a_step_launches_no_more_than_its_budget(launches, family, dropout):
    row = launches.compare(family, dropout, launches.Options())
    shares, reads = BUDGETS[family][not dropout], BUDGETS[family][2]
    assert row["ratio"] <= shares[0], row
    assert row["ratio in parts"] <= shares[1], row
    assert row["shardzoo reads"] <= reads


def test_the_loss_is_one_call(launches):
    assert launches.native("gpt2", False, 8)["shardzoo::cross_entropy_stats"] == 1


def test_glm_launches_no_more_than_gpt2_and_its_second_positions(launches):
    with launches.AS_ON_A_GPU:
        glm, gpt2 = (launches.native(family, True, 8).total() for family in ("glm", "gpt2"))
    assert glm <= gpt2 + 8
