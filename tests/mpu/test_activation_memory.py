"""What autograd keeps for backward, measured with saved-tensor hooks, against the formulas of docs/mpu.md."""

from __future__ import annotations

import pytest
import torch

from shardzoo import mpu

BATCH, POSITIONS, HIDDEN, HEADS = 2, 16, 32, 4


def kept_bytes(mesh, build, layers, options):
    """Bytes of all distinct storages that the graph of one forward pass keeps alive, parameters aside."""
    model = build(mesh, layers=layers, hidden=HIDDEN, heads=HEADS, vocabulary=37, **options)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.arange(BATCH * POSITIONS).view(BATCH, POSITIONS) % 37
    mpu.dropout_state.set(0, 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, ids)
    del loss
    return sum(storage.nbytes() for storage in kept.values())


def per_layer(run_mesh, tp, build, **options):
    one, three = (run_mesh(tp, kept_bytes, build, layers, options)[0] for layers in (1, 3))
    return (three - one) / 2


def formula(tp, sequence_parallel, recompute):
    """docs/mpu.md, for fp32: n = B S H elements and a = B N S S attention weights."""
    n, a, tokens = BATCH * POSITIONS * HIDDEN, BATCH * HEADS * POSITIONS**2, BATCH * POSITIONS
    outer_share = tp if sequence_parallel else 1
    if recompute == "full":
        return 4 * n / outer_share  # the layer's input
    outer = 4 * (2 * n + 2 * n) + 4 * 2 * 2 * tokens  # norm inputs and outputs, statistics
    inner = 4 * (3 * n + n + 4 * n + 4 * n)  # q, k, v, attention's output, GELU's input and output
    attention = 0 if recompute == "selective" else (4 + 4) * a
    constants = 8 * BATCH * (2 if recompute == "selective" else 3)  # a key per sample of each dropout
    return outer / outer_share + (inner + attention) / tp + constants


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_keeps_what_the_formula_says(tp, sequence_parallel, recompute, run_mesh, helpers):
    options = {"sequence_parallel": sequence_parallel, "recompute": recompute}
    measured = per_layer(run_mesh, tp, helpers.build_transformer, **options)
    assert measured == formula(tp, sequence_parallel, recompute)


def test_the_loss_keeps_the_logits_and_a_few_numbers_per_token():
    logits = torch.randn(64, 500, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(500, (64,))
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mpu.vocab_parallel_cross_entropy(logits, labels)
    assert sum(storage.nbytes() for storage in kept.values()) <= logits.numel() * 2 + 64 * 32
