"""A training loop without the trainer: the dropout masks follow from PyTorch's generator."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny

import shardzoo
from shardzoo.models import ParallelConfig
from shardzoo.mpu import Dropout, dropout_state

RATE = 0.25
FAMILIES = ("gpt2", "t5", "bert")


def make_batch():
    ids = torch.randint(3, 90, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(mesh, family, seeds=(5, 5), recompute="none"):
    """On one rank: the losses of three steps, and of three more from the first weights."""
    parallel_config = ParallelConfig(recompute=recompute)
    batch = make_batch()
    losses = []
    for seed in seeds:
        model = shardzoo.from_config(tiny(family, RATE), mesh, parallel_config=parallel_config)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank = 0 if mesh is None else mesh.tp_rank
        torch.manual_seed(seed + 100 * rank)  # the first rank's generator counts
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loop_needs_nothing_but_the_model(family, run_mesh):
    dropout_state.clear()
    losses = train(None, family)
    assert torch.equal(losses[:3], losses[3:])
    for recompute in ("full", "selective"):
        torch.testing.assert_close(train(None, family, recompute=recompute), losses)
    assert (train(None, family, seeds=(6,)) - losses[:3]).abs().min() > 1e-4
    for found in run_mesh(2, train, family):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)


def look_at_masks(mesh):
    """On one rank: where the first dropout of three calls drops, and of the first two repeated."""
    model = shardzoo.from_config(tiny("gpt2", RATE), mesh).train()
    masks = []
    sites = [module for module in model.modules() if isinstance(module, Dropout)]
    sites[0].register_forward_hook(lambda *call: masks.append(call[2] == 0))
    ids = torch.arange(600).view(10, 60) % 90
    for seed, calls in ((3, 3), (3, 2)):
        torch.manual_seed(seed)
        for _ in range(calls):
            model(ids)
    return masks


def test_masks_have_the_rate_and_each_call_others(run_mesh):
    dropout_state.clear()
    masks = look_at_masks(None)
    for mask in masks[:3]:
        assert abs(mask.float().mean() - RATE) < 0.01  # of 19,200 elements: 3 sigma
        assert (mask.float().mean(-1) - RATE).abs().max() < 0.4
    agreement = (masks[0] == masks[1]).float().mean()
    assert abs(agreement - (RATE**2 + (1 - RATE) ** 2)) < 0.02
    assert torch.equal(masks[0], masks[3])
    assert torch.equal(masks[1], masks[4])
    for found in run_mesh(2, look_at_masks):
        assert all(map(torch.equal, found, masks))
    replicas = run_mesh(1, look_at_masks, data=2)  # other samples have other masks
    assert torch.equal(replicas[0][0], masks[0])
    assert not torch.equal(replicas[1][0], masks[0])


def test_a_key_that_is_set_counts_until_it_is_cleared():
    model = shardzoo.from_config(tiny("bert", RATE)).train()
    batch = make_batch()
    losses = []
    for _ in range(2):
        dropout_state.set(1, 0)
        losses.append(model(**batch).loss.item())
    dropout_state.clear()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model.eval()(**batch)
    assert torch.equal(torch.get_rng_state(), state)
    losses.append(model.train()(**batch).loss.item())
    assert losses[0] == losses[1] != losses[2]
    # Dropout in evaluation, as for Monte-Carlo estimates.
    model.eval()
    for module in model.modules():
        if isinstance(module, Dropout):
            module.train()
    assert model(**batch).loss != model(**batch).loss


@pytest.mark.before_release
def test_a_loop_over_a_compiled_model():
    dropout_state.clear()
    torch.compiler.reset()
    batch = make_batch()
    losses = []
    for compiles in (False, True):
        model = shardzoo.from_config(tiny("gpt2", RATE, layers=1)).train()
        if compiles:
            model.compile(backend="aot_eager")
        torch.manual_seed(2)
        losses.append([model(**batch).loss for _ in range(3)])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
