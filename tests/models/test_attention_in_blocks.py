"""Attention that computes a block of queries at a time gives a model the results of attention written out."""

from __future__ import annotations

import importlib

import pytest
import torch
from every_case import by_turns
from memory import kept_bytes, peak_of
from tiny_models import TINY, tiny

from shardzoo import mpu
from shardzoo.models import ParallelConfig, config_from_dict, family, from_config
from shardzoo.models.activations import Batch, Layout, block_bytes
from shardzoo.mpu import ParallelMesh

ATTENTION = importlib.import_module("shardzoo.ops.attention")  # `ops.attention` is the function
LENGTHS = (19, 13)


@pytest.fixture
def blocks(monkeypatch):
    """Switches to blocks of five queries."""

    def switch():
        monkeypatch.setattr(ATTENTION, "MIN_BLOCKED_SCORES", 1)
        monkeypatch.setattr(ATTENTION, "MIN_ROWS", 5)
        monkeypatch.setitem(ATTENTION.BYTES_AT_ONCE, "cpu", 1)

    return switch


def batch_of(name, padded):
    seq2seq = family(name).kind == "encoder-decoder"
    ids = torch.arange(2 * LENGTHS[0]).view(2, -1) * 7 % 89 + 5
    batch = {"input_ids": ids, "labels": ids[:, : LENGTHS[1]].clone() if seq2seq else ids}
    if padded and name != "glm":
        batch["attention_mask"] = (
            torch.arange(LENGTHS[0]) < torch.tensor([[11], [LENGTHS[0]]])
        ).long()
    elif padded:
        batch["attention_mask"] = torch.tensor([4, 9])  # prefixes
    return batch


def step(mesh, name, padded, parallel_config):
    """Returns the loss, and the gradients of the parameters that are not split."""
    model = from_config(
        config_from_dict(tiny(name, 0.3)), mesh, parallel_config=parallel_config
    ).train()
    mpu.dropout_state.set(3, 8)
    loss = model(**batch_of(name, padded)).loss
    loss.backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


@pytest.mark.parametrize("padded", by_turns([True, False], 2))
@pytest.mark.parametrize("name", TINY)
def test_a_step_is_that_of_attention_written_out(name, padded, blocks):
    loss, grads = step(None, name, padded, ParallelConfig())
    blocks()
    ours, our_grads = step(None, name, padded, ParallelConfig())
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    for key, grad in grads.items():
        torch.testing.assert_close(
            our_grads[key], grad, rtol=1e-4, atol=1e-5 * grad.abs().max(), msg=key
        )


def loss_of(mesh: ParallelMesh | None, name, recompute, sequence_parallel):
    return step(
        mesh, name, True, ParallelConfig(sequence_parallel=sequence_parallel, recompute=recompute)
    )[0]


@pytest.mark.parametrize(
    ("recompute", "tp"), by_turns([("selective", 3), ("full", 2), ("none", 4)], 2)
)
@pytest.mark.parametrize("name", ["t5", "umt5", "gpt2", "glm"])
def test_layouts_and_recomputation_change_nothing(name, recompute, tp, blocks, run_mesh):
    expected = step(None, name, True, ParallelConfig())[0]
    blocks()
    for loss in run_mesh(tp, loss_of, name, recompute, False):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", ["t5", "umt5", "gpt2", "bart", "llama"])
def test_a_block_keeps_what_the_formula_says(name, recompute, blocks):
    """In particular, nothing as large as the scores."""
    blocks()
    parallel_config = ParallelConfig(recompute=recompute)

    def kept(layers):
        model = from_config(
            config_from_dict(tiny(name, 0.1, layers=layers)), parallel_config=parallel_config
        ).train()
        for _ in range(2):  # the second key knows no uses, so each dropout keeps keys of its own
            mpu.dropout_state.set(0, 0)
        return kept_bytes(lambda: model(**batch_of(name, False)).loss, model.parameters())

    seq2seq = family(name).kind == "encoder-decoder"
    batch = Batch(2, LENGTHS[0], LENGTHS[1] if seq2seq else 0, False)
    stacks = family(name).activations(config_from_dict(tiny(name, 0.1, layers=1))).stacks
    layout = Layout(4, 1, parallel_config)
    assert kept(3) - kept(2) == sum(block_bytes(stack, batch, layout).kept for stack in stacks)


@pytest.mark.parametrize("name", ["t5", "umt5", "gpt2"])
def test_a_long_step_never_holds_the_scores(name, monkeypatch):
    """One layer of 4 heads with 2,048 positions: its scores take 64 MiB, its step in all less."""
    monkeypatch.setitem(ATTENTION.BYTES_AT_ONCE, "cpu", 1)
    longer = {"n_positions": 2048} if name == "gpt2" else {}
    model = from_config(
        config_from_dict(tiny(name, 0.1, layers=1, vocab_size=32, **longer))
    ).train()
    ids = torch.arange(2048)[None] % 29 + 2
    mpu.dropout_state.set(0, 0)
    assert peak_of(lambda: model(input_ids=ids, labels=ids).loss.backward()) < 4 * 2048**2 * 4
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
