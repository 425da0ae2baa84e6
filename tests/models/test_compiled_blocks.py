"""Compiled blocks: the losses of plain ones, with dropout, and one graph for all blocks of a stack.

`torch.compile` is run with a backend that records the graphs and runs them with PyTorch's operators,
so that rounding is that of the plain blocks.
"""

from __future__ import annotations

import pytest
import torch._dynamo.config as limits
from compiled_blocks import compare
from every_case import every_day
from tiny_models import TINY

# Stacks whose blocks are of several kinds, and the number of kinds: windows or rotations differ, or
# the first block has a norm less.
KINDS = {
    "modernbert": 3,
    "modernbert-decoder": 3,
    "smollm3": 2,
    "gemma2": 2,
    "gemma3_text": 2,
    "olmo3": 2,
    "t5gemma": 4,
    "t5gemma2": 4,
}
NEWER = ("longt5", "deberta-v2", "t5gemma", "t5gemma2")


@pytest.fixture
def _same_limits():
    """Undoes what compiling a model does to the limits of this process."""
    names = ("recompile_limit", "accumulated_recompile_limit")
    with limits.patch({name: getattr(limits, name) for name in names}):
        yield


@pytest.mark.usefixtures("_same_limits")
@pytest.mark.parametrize(
    ("family", "layers"),
    every_day(
        [("gpt2", 12)],
        more=[
            *((family, 12) for family in (*TINY, *NEWER) if family != "gpt2"),
            *((family, 24) for family in TINY),
        ],
    ),
)
def test_blocks_share_a_graph(family, layers):
    compiled, plain, graphs = compare(None, family, layers)
    assert compiled == pytest.approx(plain, rel=1e-6)
    assert graphs <= KINDS.get(family, 1)


@pytest.mark.before_release
@pytest.mark.parametrize("family", TINY)
def test_blocks_of_a_split_model_share_a_graph(family, run_mesh):
    for compiled, plain, graphs in run_mesh(2, compare, family, 12, isolated=True):
        assert compiled == pytest.approx(plain, rel=1e-6)
        assert graphs <= KINDS.get(family, 1)


@pytest.mark.before_release
@pytest.mark.parametrize("exchange", ["heads", "keys"])
@pytest.mark.parametrize("family", ["gpt2", "mistral", "modernbert", "glm", "umt5"])
def test_blocks_of_split_sequences_share_a_graph(family, exchange, run_mesh):
    settings = {"context_exchange": exchange}
    for compiled, plain, graphs in run_mesh(
        1, compare, family, 4, context=2, isolated=True, **settings
    ):
        assert compiled == pytest.approx(plain, rel=1e-6)
        assert graphs <= KINDS.get(family, 1)
