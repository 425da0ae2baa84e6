"""Inputs of recomputed blocks wait in the host's memory, and come back as they were."""

from __future__ import annotations

import weakref
from functools import partial
from unittest import mock

import pytest
import torch
from every_case import by_turns
from tiny_models import TINY, tiny

from shardzoo.models import ParallelConfig, config_from_dict, family, from_config
from shardzoo.models.activations import Batch, Layout, block_bytes
from shardzoo.models.blocks import offload
from shardzoo.models.pipeline import list_stacks
from shardzoo.mpu import dropout_state

LAYERS = 4


@pytest.fixture
def copying():
    """A processor's streams run at once, so they take the way of a GPU's through the same lines."""
    with mock.patch.object(offload, "find_copy_stream", return_value=torch.cpu.Stream()):
        yield


def build(family, recompute, mesh=None, *, sequence_parallel=False):
    torch.manual_seed(0)
    config = ParallelConfig(sequence_parallel, recompute)
    return from_config(tiny(family, layers=LAYERS), mesh, parallel_config=config).train()


def batch(family):
    ids = torch.arange(24).view(2, 12) % 37 + 5
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    if family == "glm":
        mask = torch.tensor([4, 9])
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


def gradients(model, family):
    """Of two micro-batches, both of whose forward passes come first, as in a pipeline."""
    losses = []
    for first in (0, 2):
        dropout_state.set(1, first)
        losses.append(model(**batch(family)).loss)
    for loss in losses:
        loss.backward()
    return torch.stack(losses).detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("family", by_turns(["t5", *(name for name in TINY if name != "t5")], 9))
def test_nothing_changes(copying, family):
    losses, kept = gradients(build(family, "none"), family)
    again, moved = gradients(build(family, "offload"), family)
    assert again.equal(losses)
    for value, same in zip(kept, moved, strict=True):
        assert value is same is None or value.equal(same)


def gradients_of_a_rank(mesh, recompute):
    with mock.patch.object(offload, "find_copy_stream", return_value=torch.cpu.Stream()):
        return gradients(build("t5", recompute, mesh, sequence_parallel=True), "t5")


@pytest.mark.before_release
def test_nothing_changes_for_parts_of_sequences(run_mesh):
    kept = run_mesh(2, partial(gradients_of_a_rank, recompute="none"))
    moved = run_mesh(2, partial(gradients_of_a_rank, recompute="offload"))
    for (losses, values), (again, same) in zip(kept, moved, strict=True):
        assert losses.equal(again)
        assert all(value.equal(other) for value, other in zip(values, same, strict=True))


def count_inputs_on_device(recompute):
    """How many inputs of blocks are still there when the last block has run, and at the end of the forward pass."""
    model = build("gpt2", recompute)
    inputs = []
    counts = []

    def count() -> int:
        return sum(found() is not None for found in inputs)

    [(_, blocks)] = list_stacks(model)
    for block in blocks:
        block.register_forward_pre_hook(lambda module, given: inputs.append(weakref.ref(given[0])))
    blocks[-1].register_forward_hook(lambda *_: counts.append(count()))
    dropout_state.set(1, 0)
    loss = model(**batch("gpt2")).loss
    counts.append(count())
    loss.backward()
    return counts[:2]


def test_the_device_has_the_last_inputs_only(copying):
    assert count_inputs_on_device("full") == [LAYERS, LAYERS]
    # The block that has run has its input, and the one before it may be on its way.
    during, after = count_inputs_on_device("offload")
    assert during <= 2
    assert after <= 1


def test_the_formula_counts_no_inputs_on_a_gpu():
    stack = family("gpt2").activations(config_from_dict(tiny("gpt2"))).stacks[0]
    counts = {}
    for recompute in ("full", "offload"):
        for device in ("cuda", "cpu"):
            layout = Layout(2, parallel_config=ParallelConfig(recompute=recompute), device=device)
            counts[recompute, device] = block_bytes(stack, Batch(2, 12), layout)
    assert counts["offload", "cpu"] == counts["full", "cpu"]
    kept = counts["full", "cuda"].kept
    assert kept == 2 * 12 * stack.block.hidden * 2
    assert counts["offload", "cuda"].kept == 0
    assert counts["offload", "cuda"].working == counts["full", "cuda"].working + 2 * kept


def test_an_input_arrives_before_the_block_that_needs_it(copying):
    """While a block computes again, the input of the block before it is under way already."""
    takes = []
    take = offload.OffloadedInput.take

    def note(saved):
        is_here = saved._arriving is not None
        x = take(saved)
        takes.append((is_here, saved._previous is None or saved._previous._arriving is not None))
        return x

    with mock.patch.object(offload.OffloadedInput, "take", note):
        gradients(build("gpt2", "offload"), "gpt2")
    assert takes == 2 * [(False, True), *(LAYERS - 1) * [(True, True)]]


def test_a_processor_moves_nothing():
    with mock.patch.object(offload, "OffloadedInput", None):
        gradients(build("gpt2", "offload"), "gpt2")


@pytest.mark.parametrize("family", ["gpt2", "glm"])
def test_states_that_went_to_the_host_are_not_returned(family):
    model = build(family, "offload")
    with pytest.raises(ValueError, match="recompute='offload' moves the hidden states"):
        model(**batch(family), output_hidden_states=True)
    with torch.no_grad():
        found = model.eval()(**batch(family), output_hidden_states=True)
    assert len(found.hidden_states) == LAYERS + 1
