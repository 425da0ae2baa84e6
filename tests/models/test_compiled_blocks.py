"""Compiled blocks: the losses of plain ones, with dropout, and one graph for all blocks of a stack.

`torch.compile` is run with a backend that records the graphs and runs them with PyTorch's operators,
so that rounding is that of the plain blocks.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from every_case import every_day
from parity import randomize
from tiny_models import TINY, tiny
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardzoo
from shardzoo.models.pipeline import list_stacks
from shardzoo.mpu import ParallelMesh, assign_dropout_sites, dropout_state
from shardzoo.trainer.engines.precision import compile_model

STEPS = 3
# Stacks whose blocks are of several kinds, and the number of kinds: windows or rotations differ, or
# the first block has a norm less.
KINDS = {"modernbert": 3, "smollm3": 2}


@pytest.fixture(autouse=True)
def _leave_no_graphs():
    limits = torch._dynamo.config
    before = (limits.recompile_limit, limits.accumulated_recompile_limit)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    limits.recompile_limit, limits.accumulated_recompile_limit = before
    dropout_state.clear()


@pytest.fixture
def two_ranks():
    """Has a mesh of two ranks, of which the other one does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield ParallelMesh(2)
    dist.destroy_process_group()


def build(family, layers, mesh):
    model = shardzoo.from_config(tiny(family, 0.1, layers=layers), mesh, seed=0)
    if mesh is not None:
        randomize(model, 0)
    assign_dropout_sites(model)
    return model.train()


def train(model):
    """Returns the losses of some steps of SGD, each with new dropout masks."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (2, 12), generator=generator)
    losses = []
    for step in range(STEPS):
        dropout_state.set(0, step * len(ids))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
        model.zero_grad()
    return losses


def check_compiled(family, layers, mesh):
    plain = train(build(family, layers, mesh))
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    model = build(family, layers, mesh)
    compile_model(model, record)
    assert train(model) == pytest.approx(plain, rel=1e-6)
    assert len(graphs) <= len(list_stacks(model)) * KINDS.get(family, 1)


@pytest.mark.parametrize(
    ("family", "layers"),
    every_day(
        [("gpt2", 12)],
        more=[
            *((family, 12) for family in TINY if family != "gpt2"),
            *((family, 24) for family in TINY),
        ],
    ),
)
def test_blocks_share_a_graph(family, layers):
    check_compiled(family, layers, None)


@pytest.mark.parametrize("family", every_day([], more=TINY))
def test_blocks_of_a_split_model_share_a_graph(family, two_ranks):
    check_compiled(family, 12, two_ranks)
