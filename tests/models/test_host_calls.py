"""Budgets of the Python functions that a training step calls, counted by benchmarks/host_calls.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from every_case import every_day

# The most calls of Python functions on an accelerator's path, and together with those of C.
BUDGETS = {
    ("gpt2", False): (3000, 4700),
    ("gpt2", True): (4800, 7800),
    ("llama", False): (3400, 5843),
    ("bert", True): (4800, 7800),
    ("t5", True): (12000, 20000),
}


@pytest.fixture(scope="module")
def host_calls():
    path = Path(__file__).parents[2] / "benchmarks" / "host_calls.py"
    spec = importlib.util.spec_from_file_location("host_calls", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["host_calls"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["host_calls"]


@pytest.mark.parametrize(
    ("family", "dropout"),
    every_day(
        [("gpt2", False), ("gpt2", True), ("llama", False)], more=[("bert", True), ("t5", True)]
    ),
)
def test_a_step_calls_no_more_than_its_budget(host_calls, family, dropout):
    calls = host_calls.count_native(family, dropout)
    assert torch.zeros(1).is_cpu  # the count leaves nothing behind
    most, most_with_c = BUDGETS[family, dropout]
    assert calls.total <= most, calls.functions.most_common(20)
    assert calls.total + calls.c_functions <= most_with_c
