"""Trains a model with compiled and with plain blocks, for test_compiled_blocks.py and its ranks."""

from __future__ import annotations

import torch
from tiny_models import tiny

import shardzoo
from shardzoo import mpu
from shardzoo.models import ParallelConfig
from shardzoo.models.pipeline import list_stacks
from shardzoo.trainer.engines.precision import compile_model

STEPS = 3


def build(family, layers, mesh, dropout=0.1, **settings):
    config = tiny(family, dropout, layers=layers)
    parallel = ParallelConfig(**settings)
    model = shardzoo.from_config(config, mesh, parallel_config=parallel, seed=0)
    mpu.assign_dropout_sites(model)
    return model.train()


def train(model):
    """Returns the losses of some steps of SGD, each with new dropout masks."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (2, 12), generator=generator)
    losses = []
    for step in range(STEPS):
        mpu.dropout_state.set(0, step * len(ids))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
        model.zero_grad()
    return losses


def compare(mesh, family, layers, dropout=0.1, **settings):
    """Returns the losses of compiled blocks and of plain ones, and the graphs of a kind of block."""
    if mesh is not None:
        mpu.collectives.set_reduction(
            mesh.tp_group, "native"
        )  # PyTorch's, which a compiler can trace
    plain = train(build(family, layers, mesh, dropout, **settings))
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    try:
        model = build(family, layers, mesh, dropout, **settings)
        compile_model(model, record)
        compiled = train(model)
    finally:
        torch.compiler.reset()
        mpu.dropout_state.clear()
    return compiled, plain, len(graphs) / len(list_stacks(model))
